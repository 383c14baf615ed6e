"use strict";

// Shows what /health says, every two seconds. Text only: nothing that the server says is read as markup.

function show(id, text) {
  document.getElementById(id).textContent = text;
}

async function refresh() {
  try {
    const health = await (await fetch("/health")).json();
    show("status", health.status);
    show("model", health.model);
    show("device", health.device ?? "–");
    show("open", String(health.open_requests));
  } catch {
    show("status", "not reachable");
  }
}

refresh();
setInterval(refresh, 2000);
