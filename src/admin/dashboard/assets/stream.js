// The connection: server-sent events by a streaming fetch, because only a fetch sends the token as a header.

const TOKEN = "warmroute-admin-token";
/** Without an update for this long the connection counts as lost. */
const SILENCE_MS = 8_000;
/** A page that is not shown gives its place to another viewer after this long. */
const HIDDEN_MS = 60_000;

export function storedToken() {
  return sessionStorage.getItem(TOKEN) ?? "";
}

export function storeToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

function headers() {
  const token = storedToken();
  return token ? { authorization: `Bearer ${token}` } : {};
}

/** Asks for a page of the listener. The error has the status and the listener's message. */
export async function ask(path, options = {}) {
  const answer = await fetch(path, {
    ...options,
    headers: { ...headers(), ...options.headers },
    cache: "no-store",
    credentials: "same-origin",
  });
  const text = await answer.text();
  if (!answer.ok) throw Object.assign(new Error(message(text, answer.status)), { status: answer.status });
  return JSON.parse(text);
}

function message(text, status) {
  try {
    return JSON.parse(text).error ?? `status ${status}`;
  } catch {
    return `status ${status}`;
  }
}

/** Splits the text of a stream into events. */
export class Events {
  #rest = "";

  push(text) {
    this.#rest += text;
    const events = [];
    let end = this.#rest.indexOf("\n\n");
    while (end >= 0) {
      const lines = this.#rest.slice(0, end).split("\n");
      this.#rest = this.#rest.slice(end + 2);
      const field = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
      events.push({ event: field("event"), data: field("data") });
      end = this.#rest.indexOf("\n\n");
    }
    return events;
  }
}

/** Keeps a connection: `onEvent(name, data)`, `onState(state, detail)` with live, lost, token or refused. */
export function connect({ onEvent, onState }) {
  let controller = null;
  let delay = 500;
  let hiddenTimer = 0;
  let timer = 0;

  async function run() {
    clearTimeout(timer);
    const own = new AbortController();
    controller = own;
    let silence = 0;
    const listen = () => {
      clearTimeout(silence);
      silence = setTimeout(() => own.abort(), SILENCE_MS);
    };
    try {
      listen();
      const answer = await fetch("dashboard/events", { headers: headers(), signal: own.signal, cache: "no-store" });
      if (answer.status === 401) {
        controller = null;
        onState("token", storedToken() ? "The router does not know this token." : "");
        return;
      }
      if (!answer.ok) {
        onState("refused", message(await answer.text(), answer.status));
        delay = 5_000;
      } else {
        const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
        const events = new Events();
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          listen();
          for (const { event, data } of events.push(value)) onEvent(event, JSON.parse(data));
          delay = 500;
          onState("live");
        }
        onState("lost", "the router closed the connection");
      }
    } catch {
      if (controller === own) onState("lost", "no connection");
    } finally {
      clearTimeout(silence);
    }
    if (controller !== own) return;
    timer = setTimeout(run, delay);
    delay = Math.min(delay * 2, 5_000);
  }

  function stop() {
    clearTimeout(timer);
    const old = controller;
    controller = null;
    old?.abort();
  }

  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiddenTimer);
    if (document.hidden) {
      hiddenTimer = setTimeout(() => {
        stop();
        onState("lost", "paused while hidden");
      }, HIDDEN_MS);
    } else if (!controller) {
      restart();
    }
  });

  function restart() {
    stop();
    delay = 500;
    run();
  }

  run();
  return { restart };
}
