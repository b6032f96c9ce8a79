// An event stream that knows when it is dead. EventSource cannot see the signs
// of life that a server sends as comments, and waits forever on a connection
// that died while the machine slept; so this reads the stream itself.

// silence is how long a stream may be quiet before it is taken for dead, in ms.
const silence = 17000;

export class Stream {
  // address is called for each connection; handlers are called by event name
  // with (data, id). $lost, $back and $denied tell of the connection itself.
  constructor(address, handlers) {
    this.address = address;
    this.handlers = handlers;
    this.id = "";
    this.tries = 0;
    this.closed = false;
    this.seen = this.ticked = Date.now();
    this.onvisible = () => document.hidden ? this.drop() : this.open();
    this.ononline = () => this.reopen();
    document.addEventListener("visibilitychange", this.onvisible);
    addEventListener("online", this.ononline);
    addEventListener("pageshow", this.ononline);
    this.watch = setInterval(() => this.check(), 1000);
    this.open();
  }

  close() {
    this.closed = true;
    clearInterval(this.watch);
    document.removeEventListener("visibilitychange", this.onvisible);
    removeEventListener("online", this.ononline);
    removeEventListener("pageshow", this.ononline);
    this.drop();
  }

  // drop ends the connection, as a hidden page does: it costs one of the few
  // that a browser has for the site.
  drop() {
    clearTimeout(this.timer);
    this.timer = 0;
    if (this.abort) this.abort.abort();
    this.abort = null;
  }

  reopen() {
    this.drop();
    this.tries = 0;
    this.open();
  }

  // check notices a machine that slept and a connection that died silently.
  check() {
    const now = Date.now(), slept = now - this.ticked > 5000;
    this.ticked = now;
    if (document.hidden || this.closed) return;
    if (slept || this.abort && now - this.seen > silence) this.reopen();
  }

  async open() {
    if (this.closed || this.abort || this.timer || document.hidden) return;
    const abort = this.abort = new AbortController();
    this.seen = Date.now();
    const fire = (name, ...args) => { if (this.handlers[name]) this.handlers[name](...args); };
    try {
      const headers = {Accept: "text/event-stream"};
      if (this.id) headers["Last-Event-ID"] = this.id;
      const r = await fetch(this.address(), {headers, signal: abort.signal, cache: "no-store", credentials: "same-origin"});
      if (r.status === 401 || r.status === 403 || r.status === 404 || r.status === 410) {
        fire(r.status === 404 || r.status === 410 ? "$gone" : "$denied");
        this.drop();
        this.closed = true;
        return;
      }
      if (!r.ok || !r.body) throw new Error("status " + r.status);
      if (this.tries > 0) fire("$back");
      const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "", event = "", data = [], id = this.id;
      for (;;) {
        const {value, done} = await reader.read();
        if (done) break;
        if (this.abort !== abort) return;
        this.seen = Date.now();
        this.tries = 0;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const raw of lines) {
          const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
          if (line === "") {
            this.id = id;
            if (data.length) fire(event || "message", data.join("\n"), id);
            if (this.abort !== abort) return;
            event = "";
            data = [];
          } else if (line[0] !== ":") {
            const at = line.indexOf(":"), name = at < 0 ? line : line.slice(0, at);
            const text = at < 0 ? "" : line.slice(at + (line[at + 1] === " " ? 2 : 1));
            if (name === "event") event = text;
            else if (name === "data") data.push(text);
            else if (name === "id") id = text;
          }
        }
      }
    } catch (e) {
      if (abort.signal.aborted) return;
    }
    if (this.abort !== abort) return;
    this.abort = null;
    if (this.closed) return;
    this.tries++;
    if (this.tries > 1) fire("$lost");
    const wait = Math.min(500 * 2 ** Math.min(this.tries - 1, 4), 5000);
    this.timer = setTimeout(() => {
      this.timer = 0;
      this.open();
    }, wait * (0.8 + 0.4 * Math.random()));
  }
}
