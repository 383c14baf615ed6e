"""The driver table of a real GPU: cuda.bindings, statuses as ints, nothing checked here.

Owns the mapping of calls to the driver API. Handles are the bindings' own objects; the current context is the primary
context of the device, made current by torch before any call.
"""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

SM = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
GREEN_CTX_DEFAULT_STREAM = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM


class CudaTable:
    """A DriverTable over one device ordinal."""

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal

    def stream_priority_range(self) -> tuple[int, int, int]:
        status, least, greatest = driver.cuCtxGetStreamPriorityRange()
        return int(status), int(least), int(greatest)

    def stream_create(self, flags: int, priority: int) -> tuple[int, Any]:
        status, stream = driver.cuStreamCreateWithPriority(flags, priority)
        return int(status), stream

    def stream_destroy(self, stream: Any) -> tuple[int]:
        return (int(driver.cuStreamDestroy(stream)[0]),)

    def stream_synchronize(self, stream: Any) -> tuple[int]:
        return (int(driver.cuStreamSynchronize(stream)[0]),)

    def stream_wait_event(self, stream: Any, event: Any) -> tuple[int]:
        return (int(driver.cuStreamWaitEvent(stream, event, 0)[0]),)

    def sm_resource(self) -> tuple[int, Any]:
        status, device = driver.cuDeviceGet(self._ordinal)
        if int(status):
            return int(status), None
        status, resource = driver.cuDeviceGetDevResource(device, SM)
        return int(status), resource

    def sm_split(self, resource: Any, sms: int) -> tuple[int, Any, Any]:
        status, groups, _, rest = driver.cuDevSmResourceSplitByCount(1, resource, 0, sms)
        return int(status), groups[0] if groups else None, rest

    def sm_count(self, resource: Any) -> tuple[int, int]:
        return 0, int(resource.sm.smCount)

    def resource_descriptor(self, resource: Any) -> tuple[int, Any]:
        status, descriptor = driver.cuDevResourceGenerateDesc([resource], 1)
        return int(status), descriptor

    def green_ctx_create(self, descriptor: Any) -> tuple[int, Any]:
        status, device = driver.cuDeviceGet(self._ordinal)
        if int(status):
            return int(status), None
        status, context = driver.cuGreenCtxCreate(descriptor, device, GREEN_CTX_DEFAULT_STREAM)
        return int(status), context

    def green_ctx_destroy(self, green_ctx: Any) -> tuple[int]:
        return (int(driver.cuGreenCtxDestroy(green_ctx)[0]),)

    def green_ctx_stream_create(self, green_ctx: Any, flags: int, priority: int) -> tuple[int, Any]:
        status, stream = driver.cuGreenCtxStreamCreate(green_ctx, flags, priority)
        return int(status), stream

    def green_ctx_record_event(self, green_ctx: Any, event: Any) -> tuple[int]:
        return (int(driver.cuGreenCtxRecordEvent(green_ctx, event)[0]),)

    def event_create(self, flags: int) -> tuple[int, Any]:
        status, event = driver.cuEventCreate(flags)
        return int(status), event

    def event_record(self, event: Any, stream: Any) -> tuple[int]:
        return (int(driver.cuEventRecord(event, stream)[0]),)

    def event_query(self, event: Any) -> tuple[int]:
        return (int(driver.cuEventQuery(event)[0]),)

    def event_synchronize(self, event: Any) -> tuple[int]:
        return (int(driver.cuEventSynchronize(event)[0]),)

    def event_elapsed_ms(self, start: Any, end: Any) -> tuple[int, float]:
        status, elapsed = driver.cuEventElapsedTime(start, end)
        return int(status), float(elapsed)

    def event_destroy(self, event: Any) -> tuple[int]:
        return (int(driver.cuEventDestroy(event)[0]),)
