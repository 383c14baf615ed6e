from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_REJECTED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]

class RejectReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REJECT_REASON_UNSPECIFIED: _ClassVar[RejectReason]
    REJECT_REASON_EMPTY_PROMPT: _ClassVar[RejectReason]
    REJECT_REASON_TOKEN_OUT_OF_VOCABULARY: _ClassVar[RejectReason]
    REJECT_REASON_CONTEXT_EXCEEDED: _ClassVar[RejectReason]
    REJECT_REASON_PARAMETER_OUT_OF_RANGE: _ClassVar[RejectReason]
    REJECT_REASON_UNSUPPORTED: _ClassVar[RejectReason]
    REJECT_REASON_NEVER_FITS: _ClassVar[RejectReason]
    REJECT_REASON_QUEUE_FULL: _ClassVar[RejectReason]
    REJECT_REASON_DRAINING: _ClassVar[RejectReason]
    REJECT_REASON_MALFORMED: _ClassVar[RejectReason]
    REJECT_REASON_GRAMMAR: _ClassVar[RejectReason]

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_STARTING: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_DEAD: _ClassVar[EngineState]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_REJECTED: FinishReason
FINISH_REASON_ERROR: FinishReason
REJECT_REASON_UNSPECIFIED: RejectReason
REJECT_REASON_EMPTY_PROMPT: RejectReason
REJECT_REASON_TOKEN_OUT_OF_VOCABULARY: RejectReason
REJECT_REASON_CONTEXT_EXCEEDED: RejectReason
REJECT_REASON_PARAMETER_OUT_OF_RANGE: RejectReason
REJECT_REASON_UNSUPPORTED: RejectReason
REJECT_REASON_NEVER_FITS: RejectReason
REJECT_REASON_QUEUE_FULL: RejectReason
REJECT_REASON_DRAINING: RejectReason
REJECT_REASON_MALFORMED: RejectReason
REJECT_REASON_GRAMMAR: RejectReason
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_STARTING: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_DEAD: EngineState

class SessionRequest(_message.Message):
    __slots__ = ("hello", "adds", "aborts", "ack")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADDS_FIELD_NUMBER: _ClassVar[int]
    ABORTS_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    adds: _containers.RepeatedCompositeFieldContainer[AddRequest]
    aborts: bytes
    ack: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., adds: _Optional[_Iterable[_Union[AddRequest, _Mapping]]] = ..., aborts: _Optional[bytes] = ..., ack: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "client_name", "heartbeat_s")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_S_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    client_name: str
    heartbeat_s: float
    def __init__(self, protocol_version: _Optional[int] = ..., client_name: _Optional[str] = ..., heartbeat_s: _Optional[float] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("number", "prompt_ids", "prefix_hashes", "cache_salt", "sampling", "priority", "deadline_s", "label", "trace_parent", "grammar")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    number: int
    prompt_ids: bytes
    prefix_hashes: bytes
    cache_salt: str
    sampling: SamplingParams
    priority: int
    deadline_s: float
    label: str
    trace_parent: str
    grammar: Grammar
    def __init__(self, number: _Optional[int] = ..., prompt_ids: _Optional[bytes] = ..., prefix_hashes: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., priority: _Optional[int] = ..., deadline_s: _Optional[float] = ..., label: _Optional[str] = ..., trace_parent: _Optional[str] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "choice", "structural_tag")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    choice: str
    structural_tag: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., choice: _Optional[str] = ..., structural_tag: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "n", "logprobs", "prompt_logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "output", "state")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    output: StepOutput
    state: EngineState
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., output: _Optional[_Union[StepOutput, _Mapping]] = ..., state: _Optional[_Union[EngineState, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "info")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    info: GetInfoResponse
    def __init__(self, protocol_version: _Optional[int] = ..., info: _Optional[_Union[GetInfoResponse, _Mapping]] = ...) -> None: ...

class StepOutput(_message.Message):
    __slots__ = ("sequence", "step", "accepted", "started", "started_cached", "numbers", "tokens", "logprobs", "prompt_logprobs", "finishes", "ack_now")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    STARTED_CACHED_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    ACK_NOW_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    step: int
    accepted: bytes
    started: bytes
    started_cached: bytes
    numbers: bytes
    tokens: bytes
    logprobs: LogprobColumns
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    finishes: _containers.RepeatedCompositeFieldContainer[Finish]
    ack_now: bool
    def __init__(self, sequence: _Optional[int] = ..., step: _Optional[int] = ..., accepted: _Optional[bytes] = ..., started: _Optional[bytes] = ..., started_cached: _Optional[bytes] = ..., numbers: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., logprobs: _Optional[_Union[LogprobColumns, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[Finish, _Mapping]]] = ..., ack_now: _Optional[bool] = ...) -> None: ...

class LogprobColumns(_message.Message):
    __slots__ = ("rows", "sampled", "ranks", "counts", "top_ids", "top_logprobs")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    rows: bytes
    sampled: bytes
    ranks: bytes
    counts: bytes
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, rows: _Optional[bytes] = ..., sampled: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("number", "start", "logprobs", "ranks", "top", "top_ids", "top_logprobs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    number: int
    start: int
    logprobs: bytes
    ranks: bytes
    top: int
    top_ids: bytes
    top_logprobs: bytes
    def __init__(self, number: _Optional[int] = ..., start: _Optional[int] = ..., logprobs: _Optional[bytes] = ..., ranks: _Optional[bytes] = ..., top: _Optional[int] = ..., top_ids: _Optional[bytes] = ..., top_logprobs: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "reject_reason", "parameter", "retry_after_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REJECT_REASON_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reject_reason: RejectReason
    parameter: str
    retry_after_s: float
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reject_reason: _Optional[_Union[RejectReason, str]] = ..., parameter: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("number", "reason", "stop_token_id", "error", "prompt_tokens", "output_tokens", "cached_tokens")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    number: int
    reason: FinishReason
    stop_token_id: int
    error: Error
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    def __init__(self, number: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("state", "version", "model", "architecture", "dtype", "device", "vocab_size", "limits", "defaults", "eos_token_ids", "lanes", "page_size", "total_pages", "async_depth", "prefix_cache", "instance_id")
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    ASYNC_DEPTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    state: EngineState
    version: str
    model: str
    architecture: str
    dtype: str
    device: str
    vocab_size: int
    limits: Limits
    defaults: SamplingDefaults
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    lanes: LaneInfo
    page_size: int
    total_pages: int
    async_depth: int
    prefix_cache: bool
    instance_id: str
    def __init__(self, state: _Optional[_Union[EngineState, str]] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., architecture: _Optional[str] = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., vocab_size: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., defaults: _Optional[_Union[SamplingDefaults, _Mapping]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., lanes: _Optional[_Union[LaneInfo, _Mapping]] = ..., page_size: _Optional[int] = ..., total_pages: _Optional[int] = ..., async_depth: _Optional[int] = ..., prefix_cache: _Optional[bool] = ..., instance_id: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_queue", "max_message_bytes", "max_unacked_bytes", "max_logprobs")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_UNACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_queue: int
    max_message_bytes: int
    max_unacked_bytes: int
    max_logprobs: int
    def __init__(self, max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., max_queue: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_unacked_bytes: _Optional[int] = ..., max_logprobs: _Optional[int] = ...) -> None: ...

class SamplingDefaults(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class LaneInfo(_message.Message):
    __slots__ = ("overlap", "decode_sms", "prefill_sms", "sm_alignment", "decode_sms_choices")
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    DECODE_SMS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SMS_FIELD_NUMBER: _ClassVar[int]
    SM_ALIGNMENT_FIELD_NUMBER: _ClassVar[int]
    DECODE_SMS_CHOICES_FIELD_NUMBER: _ClassVar[int]
    overlap: str
    decode_sms: int
    prefill_sms: int
    sm_alignment: int
    decode_sms_choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, overlap: _Optional[str] = ..., decode_sms: _Optional[int] = ..., prefill_sms: _Optional[int] = ..., sm_alignment: _Optional[int] = ..., decode_sms_choices: _Optional[_Iterable[int]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("state", "uptime_s", "gauges", "counters", "lanes")
    STATE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    GAUGES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    state: EngineState
    uptime_s: float
    gauges: Gauges
    counters: Counters
    lanes: LaneInfo
    def __init__(self, state: _Optional[_Union[EngineState, str]] = ..., uptime_s: _Optional[float] = ..., gauges: _Optional[_Union[Gauges, _Mapping]] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., lanes: _Optional[_Union[LaneInfo, _Mapping]] = ...) -> None: ...

class Gauges(_message.Message):
    __slots__ = ("running", "waiting", "sessions", "pages_total", "pages_free", "pages_cached", "pages_referenced", "pages_retiring", "steps_in_flight", "prefills_in_flight")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_FREE_FIELD_NUMBER: _ClassVar[int]
    PAGES_CACHED_FIELD_NUMBER: _ClassVar[int]
    PAGES_REFERENCED_FIELD_NUMBER: _ClassVar[int]
    PAGES_RETIRING_FIELD_NUMBER: _ClassVar[int]
    STEPS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    sessions: int
    pages_total: int
    pages_free: int
    pages_cached: int
    pages_referenced: int
    pages_retiring: int
    steps_in_flight: int
    prefills_in_flight: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., sessions: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_free: _Optional[int] = ..., pages_cached: _Optional[int] = ..., pages_referenced: _Optional[int] = ..., pages_retiring: _Optional[int] = ..., steps_in_flight: _Optional[int] = ..., prefills_in_flight: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("sequences_accepted", "sequences_rejected", "finished_stop", "finished_length", "finished_abort", "finished_error", "prompt_tokens", "cached_tokens", "output_tokens", "steps", "preemptions", "prefix_queries", "prefix_hits", "prefill_launches", "prefill_completions", "rows_discarded", "prefills_alone", "prefills_mixed", "prefills_lane", "sequences_started", "queue_wait_us", "steps_decode", "steps_prefill", "steps_mixed", "steps_empty", "primary_busy_us", "prefill_busy_us")
    SEQUENCES_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_REJECTED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_STOP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINISHED_ABORT_FIELD_NUMBER: _ClassVar[int]
    FINISHED_ERROR_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_LAUNCHES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    ROWS_DISCARDED_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_ALONE_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_MIXED_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_LANE_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_STARTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_US_FIELD_NUMBER: _ClassVar[int]
    STEPS_DECODE_FIELD_NUMBER: _ClassVar[int]
    STEPS_PREFILL_FIELD_NUMBER: _ClassVar[int]
    STEPS_MIXED_FIELD_NUMBER: _ClassVar[int]
    STEPS_EMPTY_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_BUSY_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BUSY_US_FIELD_NUMBER: _ClassVar[int]
    sequences_accepted: int
    sequences_rejected: int
    finished_stop: int
    finished_length: int
    finished_abort: int
    finished_error: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    steps: int
    preemptions: int
    prefix_queries: int
    prefix_hits: int
    prefill_launches: int
    prefill_completions: int
    rows_discarded: int
    prefills_alone: int
    prefills_mixed: int
    prefills_lane: int
    sequences_started: int
    queue_wait_us: int
    steps_decode: int
    steps_prefill: int
    steps_mixed: int
    steps_empty: int
    primary_busy_us: int
    prefill_busy_us: int
    def __init__(self, sequences_accepted: _Optional[int] = ..., sequences_rejected: _Optional[int] = ..., finished_stop: _Optional[int] = ..., finished_length: _Optional[int] = ..., finished_abort: _Optional[int] = ..., finished_error: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., steps: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefix_queries: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., prefill_launches: _Optional[int] = ..., prefill_completions: _Optional[int] = ..., rows_discarded: _Optional[int] = ..., prefills_alone: _Optional[int] = ..., prefills_mixed: _Optional[int] = ..., prefills_lane: _Optional[int] = ..., sequences_started: _Optional[int] = ..., queue_wait_us: _Optional[int] = ..., steps_decode: _Optional[int] = ..., steps_prefill: _Optional[int] = ..., steps_mixed: _Optional[int] = ..., steps_empty: _Optional[int] = ..., primary_busy_us: _Optional[int] = ..., prefill_busy_us: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("finished", "aborted")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    finished: int
    aborted: int
    def __init__(self, finished: _Optional[int] = ..., aborted: _Optional[int] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("pages_dropped",)
    PAGES_DROPPED_FIELD_NUMBER: _ClassVar[int]
    pages_dropped: int
    def __init__(self, pages_dropped: _Optional[int] = ...) -> None: ...

class WatchCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheChanges(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[CacheChange]
    def __init__(self, changes: _Optional[_Iterable[_Union[CacheChange, _Mapping]]] = ...) -> None: ...

class CacheChange(_message.Message):
    __slots__ = ("stored", "removed")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    stored: StoredPages
    removed: bytes
    def __init__(self, stored: _Optional[_Union[StoredPages, _Mapping]] = ..., removed: _Optional[bytes] = ...) -> None: ...

class StoredPages(_message.Message):
    __slots__ = ("parent", "links", "ids", "cache_salt")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    parent: bytes
    links: bytes
    ids: bytes
    cache_salt: str
    def __init__(self, parent: _Optional[bytes] = ..., links: _Optional[bytes] = ..., ids: _Optional[bytes] = ..., cache_salt: _Optional[str] = ...) -> None: ...
