// The log viewer: only the lines that are seen are in the page, everything else
// is fetched when it is scrolled to. A sealed log is read in blocks; a live one
// also from its event stream, behind a cursor that its last window gave.

import {Renderer} from "./ansi.js";
import {Stream} from "./stream.js";
import {refresh, yieldStream} from "./live.js";

const rowHeight = 20, blockSize = 200, maxBlocks = 150, maxLive = 20000;
// Browsers bound the height of an element; a longer log is scrolled in scale.
const maxHeight = 6e6;

const section = document.getElementById("log");
let viewer = null;

class Viewer {
  constructor(box) {
    this.box = box;
    this.rows = box.querySelector("#rows");
    this.job = section.dataset.job;
    this.attempt = +section.dataset.attempt;
    this.live = section.hasAttribute("data-live");
    this.total = +section.dataset.total || 0;
    this.blocks = new Map();   // index -> lines, least recently used first
    this.tail = [];            // lines of a live log that are held here
    this.tailFirst = Infinity; // number of the first of them
    this.mounted = new Map();  // number -> row
    this.busy = 0;
    this.top = this.last = 0;
    this.columns = 0;
    this.follow = this.live && !location.hash.startsWith("#L") && !new URLSearchParams(location.search).has("from");
    this.found = null;
    this.steps = new Set();
    this.seenStep = null;
    this.controls();
    this.start();
  }

  url(kind, params) {
    const u = new URL(`/v1/jobs/${encodeURIComponent(this.job)}/logs/${kind}`, location.origin);
    u.searchParams.set("attempt", this.attempt);
    for (const [k, v] of Object.entries(params)) if (v !== "" && v !== undefined) u.searchParams.set(k, v);
    return u;
  }

  async ask(params) {
    const r = await fetch(this.url("lines", params), {cache: "no-store", credentials: "same-origin", headers: {Accept: "application/json"}});
    if (!r.ok) throw Object.assign(new Error("status " + r.status), {status: r.status});
    return r.json();
  }

  // start reads the first window and only then takes the place of the lines that
  // the server wrote into the page.
  async start() {
    const at = this.fromHash(), from = +new URLSearchParams(location.search).get("from") || 0;
    try {
      const s = await this.ask({tail: 500, limit: 500});
      this.total = Math.max(this.total, s.total || 0);
      if (this.live && !s.sealed) this.begin(s);
      else {
        this.live = false;
        this.total = s.total || 0;
      }
      const first = at ? at[0] : from || (this.live ? 0 : Math.max(this.total - Math.ceil(this.box.clientHeight / rowHeight), 1));
      if (first && first < this.tailFirst) await this.block(Math.floor((first - 1) / blockSize));
    } catch (e) {
      this.say("The log cannot be read now. ");
      setTimeout(() => this.stopped || this.start(), 3000);
      return;
    }
    if (this.stopped) return;
    this.say("");
    document.getElementById("logpages").hidden = true;
    this.box.classList.add("tall");
    this.rows.replaceChildren();
    if (this.total === 0 && !this.live) {
      const p = document.createElement("p");
      p.className = "none";
      p.textContent = "The log is empty.";
      this.rows.append(p);
    }
    this.box.addEventListener("scroll", () => this.scrolled(), {passive: true});
    this.sizer = new ResizeObserver(() => this.draw());
    this.sizer.observe(this.box);
    this.size();
    if (at) this.show(at[0]);
    else if (from) this.to((from - 1) * rowHeight);
    else this.to(Infinity);
    this.box.dataset.ready = "";
    this.buttons();
  }

  stop() {
    this.stopped = true;
    if (this.stream) this.stream.close();
    clearInterval(this.poll);
    if (this.sizer) this.sizer.disconnect();
    yieldStream(false);
  }

  // Live: lines held here and the stream that adds to them.

  begin(slice) {
    this.tail = [];
    this.open = new Map(); // step and stream -> its line without an end yet
    this.streams = new Map();
    if (slice.cursor) {
      this.tailFirst = slice.first || 1;
      for (const l of slice.lines || []) {
        const s = this.source(l.step, l.stream);
        let line;
        if (l.open) {
          s.renderer.feed(l.text);
          line = this.entry(l, s.renderer.pending());
          this.open.set(s.key, line);
        } else line = this.entry(l, s.renderer.line(l.text));
        this.tail.push(line);
        this.steps.add(l.step);
      }
      this.total = this.tailFirst + this.tail.length - 1;
    } else {
      this.tailFirst = 1;
      this.total = 0;
    }
    const after = slice.cursor || "";
    if (this.stream) this.stream.close();
    yieldStream(true);
    this.stream = new Stream(() => this.url("events", {after: this.stream && this.stream.id || after}), {
      log: data => this.take(JSON.parse(data)),
      sealed: data => this.seal(JSON.parse(data)),
      problem: data => {
        this.stream.close();
        this.say(JSON.parse(data).detail);
      },
      $lost: () => this.say("Reconnecting…"),
      $back: () => this.say(""),
      $denied: () => this.say("Signed out."),
      $gone: () => this.say("This log is no longer kept."),
    });
    clearInterval(this.poll);
    this.poll = setInterval(() => document.hidden || refresh(), 5000);
  }

  source(step, stream) {
    const key = step + " " + stream;
    let s = this.streams.get(key);
    if (!s) this.streams.set(key, s = {key, renderer: new Renderer(), decoder: new TextDecoder()});
    return s;
  }

  entry(l, line) {
    return {n: l.n, line, step: l.step, stream: l.stream, cut: l.cut || 0, lost: l.lost || 0, discarded: l.discarded || 0};
  }

  // take adds the bytes of one event. A line begins where its first byte came,
  // whatever other streams write meanwhile.
  take(e) {
    const s = this.source(e.step, e.stream);
    if (!this.steps.has(e.step)) {
      this.steps.add(e.step);
      refresh();
    }
    const begin = () => {
      let l = this.open.get(s.key);
      if (!l) {
        l = {n: ++this.total, line: {s: []}, step: e.step, stream: e.stream, cut: 0, lost: 0, discarded: 0};
        this.open.set(s.key, l);
        this.tail.push(l);
      }
      return l;
    };
    if (e.lost) begin().lost += e.lost;
    if (e.discarded) begin().discarded += e.discarded;
    if (e.data) {
      const bytes = Uint8Array.from(atob(e.data), c => c.charCodeAt(0));
      const text = s.decoder.decode(bytes, {stream: true});
      const parts = text.split("\n");
      for (let i = 0; i < parts.length; i++) {
        const last = i === parts.length - 1;
        if (last && parts[i] === "") break;
        const l = begin();
        if (last) {
          s.renderer.feed(parts[i]);
          l.dirty = s.renderer;
        } else {
          l.line = s.renderer.line(parts[i]);
          l.dirty = null;
          this.open.delete(s.key);
        }
        l.changed = true;
      }
    }
    if (this.tail.length > maxLive + blockSize) {
      const drop = this.tail.length - maxLive;
      this.tail.splice(0, drop);
      this.tailFirst += drop;
    }
    this.later();
  }

  // seal: the log is complete, and what the server says now counts, numbers too.
  async seal(e) {
    this.stream.close();
    this.stream = null;
    clearInterval(this.poll);
    yieldStream(false);
    this.live = false;
    refresh();
    this.buttons();
    try {
      const s = await this.ask({tail: 500, limit: 500});
      const first = Math.floor(this.top / rowHeight) + 1;
      this.blocks.clear();
      const b = Math.floor((Math.min(first, Math.max(s.total, 1)) - 1) / blockSize);
      await this.block(b);
      if ((b + 1) * blockSize < s.total) await this.block(b + 1);
      this.total = s.total;
    } catch (err) {
      this.total = e.lines || this.total;
    }
    this.tail = [];
    this.tailFirst = Infinity;
    for (const r of this.mounted.values()) r.remove();
    this.mounted.clear();
    this.size();
    if (this.follow) this.to(Infinity);
    this.draw();
  }

  // Reading

  line(n) {
    if (n >= this.tailFirst) return this.tail[n - this.tailFirst];
    const b = this.blocks.get(Math.floor((n - 1) / blockSize));
    return b && b[(n - 1) % blockSize];
  }

  // block reads one block of lines, in as many requests as the server wants.
  async block(i) {
    if (this.blocks.has(i)) return;
    const lines = [], renderers = new Map();
    let from = i * blockSize + 1;
    const end = from + blockSize;
    while (from < end) {
      const s = await this.ask({from, limit: end - from});
      for (const l of s.lines || []) {
        if (l.n < from || l.n >= end) continue;
        const key = l.step + " " + l.stream;
        let r = renderers.get(key);
        if (!r) renderers.set(key, r = new Renderer());
        lines[l.n - i * blockSize - 1] = this.entry(l, r.line(l.text));
        from = l.n + 1;
      }
      if (!s.next || s.next < from || !(s.lines || []).length) break;
      from = s.next;
    }
    this.blocks.set(i, lines);
    while (this.blocks.size > maxBlocks) this.blocks.delete(this.blocks.keys().next().value);
  }

  // fetch gets what is seen, one block at a time; where the reader went meanwhile
  // is asked anew each time, so a fast scroll leaves nothing behind.
  async fetch() {
    if (this.busy) return;
    this.busy = 1;
    try {
      for (let i; !this.stopped && (i = this.missing()) >= 0;) {
        await this.block(i);
        this.draw();
      }
      this.say("");
    } catch (e) {
      this.say("Some lines cannot be read now.");
      setTimeout(() => this.draw(), 2000);
    } finally {
      this.busy = 0;
    }
  }

  missing() {
    const [a, b] = this.range(0), last = Math.min(b, this.total, this.tailFirst - 1);
    for (let n = a; n <= last; n = (Math.floor((n - 1) / blockSize) + 1) * blockSize + 1) {
      const i = Math.floor((n - 1) / blockSize);
      if (!this.blocks.has(i)) return i;
    }
    return -1;
  }

  // Scrolling

  get real() { return this.total * rowHeight; }
  get view() { return this.box.clientHeight - 16; }

  size() { this.rows.style.height = Math.min(this.real, maxHeight) + "px"; }

  scale() {
    const h = Math.min(this.real, maxHeight);
    return this.real <= maxHeight ? 1 : (h - this.view) / (this.real - this.view);
  }

  scrolled() {
    const st = this.box.scrollTop, delta = st - this.last;
    this.last = st;
    if (delta !== 0 || this.scale() === 1) {
      if (this.scale() === 1) this.top = st;
      else if (Math.abs(delta) <= this.view * 1.5) this.top = Math.min(Math.max(this.top + delta, 0), this.real - this.view);
      else this.top = st / this.scale();
      const bottom = this.top >= this.real - this.view - rowHeight;
      if (this.live && this.follow !== bottom && !this.self) {
        this.follow = bottom;
        this.buttons();
      }
      this.self = false;
    }
    this.draw();
    if (this.scale() !== 1) {
      clearTimeout(this.settle);
      this.settle = setTimeout(() => this.place(), 200);
    }
  }

  // place puts the scroll bar where the position in the log says.
  place() {
    const want = Math.round(this.top * this.scale());
    if (Math.abs(want - this.box.scrollTop) > 1) {
      this.self = true;
      this.box.scrollTop = want;
    }
    this.last = this.box.scrollTop;
    this.draw();
  }

  to(top) {
    this.top = Math.min(Math.max(top, 0), Math.max(this.real - this.view, 0));
    this.place();
  }

  range(extra) {
    const a = Math.floor(this.top / rowHeight) + 1 - extra;
    return [Math.max(a, 1), a + 2 * extra + Math.ceil(this.box.clientHeight / rowHeight) + 1];
  }

  // Drawing

  later() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.size();
      if (this.follow) this.to(Infinity);
      else this.draw();
    });
  }

  draw() {
    if (this.stopped || !this.box.classList.contains("tall")) return;
    const [a, z] = this.range(20), b = Math.min(z, this.total);
    for (const [n, row] of this.mounted) {
      if (n < a || n > b) {
        row.remove();
        this.mounted.delete(n);
      }
    }
    const shift = this.box.scrollTop - this.top, scaled = this.scale() !== 1;
    let wide = this.columns;
    for (let n = a; n <= b; n++) {
      const l = this.line(n);
      let row = this.mounted.get(n);
      if (!row) {
        row = document.createElement("div");
        this.mounted.set(n, row);
        this.rows.append(row);
        row.from = null;
      }
      if (row.from !== l || l && l.changed) {
        if (l && l.dirty) l.line = l.dirty.pending();
        if (l) l.changed = false;
        row.from = l;
        wide = Math.max(wide, this.fill(row, n, l));
      }
      this.mark(row, n, l);
      const y = (n - 1) * rowHeight + (scaled ? shift : 0);
      if (row.y !== y) row.style.transform = `translateY(${row.y = y}px)`;
    }
    if (wide !== this.columns) {
      this.columns = wide;
      this.rows.style.minWidth = `calc(${wide}ch + 9rem)`;
    }
    if (this.missing() >= 0) this.fetch();
  }

  // fill writes one line into its row and returns its width in characters.
  fill(row, n, l) {
    const a = document.createElement("a"), t = document.createElement("span");
    a.className = "n";
    a.href = "#L" + n;
    a.textContent = n;
    a.setAttribute("aria-label", "Line " + n);
    t.className = "t";
    row.replaceChildren(a, t);
    if (!l) {
      row.kind = "ln loading";
      t.textContent = "…";
      return 0;
    }
    row.kind = "ln" + (l.stream === "stderr" ? " err" : l.stream === "system" ? " sys" : "");
    const chip = (text, kind = "gap") => {
      const g = document.createElement("span");
      g.className = kind;
      g.textContent = text;
      t.append(g);
    };
    if (l.lost) chip(l.lost.toLocaleString("en") + " bytes lost");
    if (l.discarded) chip(l.discarded.toLocaleString("en") + " bytes over the limit");
    let width = 0;
    for (const s of l.line.s) {
      width += s.t.length;
      if (!s.c && !s.h) {
        t.append(s.t);
        continue;
      }
      const e = document.createElement(s.h ? "a" : "span");
      if (s.c) e.className = s.c;
      if (s.h) {
        e.href = s.h;
        e.rel = "noopener noreferrer nofollow";
        e.target = "_blank";
      }
      e.textContent = s.t;
      t.append(e);
    }
    if (l.line.cut) chip(l.line.cut.toLocaleString("en") + " more characters", "gap end");
    if (l.cut) chip(l.cut.toLocaleString("en") + " more bytes", "gap end");
    const before = n > 1 && this.line(n - 1);
    if (n === 1 || before && before.step !== l.step) {
      const name = document.createElement("span");
      name.className = "st-name";
      name.textContent = stepName(l.step);
      row.append(name);
    }
    return Math.min(width, 20000);
  }

  mark(row, n) {
    const on = this.chosen && n >= this.chosen[0] && n <= this.chosen[1] || this.found && this.found.set.has(n);
    const kind = row.kind + (on ? " on" : "") + (this.found && this.found.at === n ? " hit" : "");
    if (row.className !== kind) row.className = kind;
  }

  // Links to lines

  fromHash() {
    const m = /^#L(\d{1,15})(?:-L(\d{1,15}))?$/.exec(location.hash);
    if (!m) return null;
    const a = +m[1], b = m[2] ? +m[2] : a;
    return this.chosen = [Math.min(a, b), Math.max(a, b)];
  }

  show(n) {
    this.follow = false;
    this.to((n - 1) * rowHeight - Math.floor(this.view / 3 / rowHeight) * rowHeight);
    this.buttons();
  }

  hash() {
    const at = this.fromHash();
    if (!at) return;
    const [a, b] = this.range(0);
    if (at[0] < a || at[0] > b - 2) this.show(at[0]);
    else this.draw();
  }

  // Searching

  async search(q) {
    if (!q) {
      this.found = null;
      this.matches();
      return this.draw();
    }
    this.found = {q, list: [], set: new Set(), next: 1, at: 0};
    await this.more();
    const near = Math.floor(this.top / rowHeight) + 1, f = this.found;
    if (f.list.length) this.hit(Math.max(f.list.findIndex(n => n >= near), 0));
    else {
      this.matches("Nothing found");
      this.draw();
    }
  }

  async more() {
    const f = this.found;
    this.matches("Searching…");
    try {
      // A window without a match still leads on.
      for (let tries = 0; f.next && tries < 50; tries++) {
        const s = await this.ask({q: f.q, from: f.next, limit: 200});
        for (const l of s.lines || []) {
          f.list.push(l.n);
          f.set.add(l.n);
        }
        f.next = s.next || 0;
        if ((s.lines || []).length) return;
      }
    } catch (e) {
      this.matches("The search failed");
    }
  }

  async hit(i) {
    const f = this.found;
    if (i >= f.list.length && f.next) await this.more();
    if (this.found !== f || !f.list.length) return;
    i = (i + f.list.length) % f.list.length;
    f.index = i;
    f.at = f.list[i];
    this.show(f.at);
    this.matches();
  }

  matches(text) {
    const box = document.getElementById("matches"), f = this.found;
    box.replaceChildren();
    if (text) box.append(text);
    else if (f && f.list.length) {
      box.append(`${f.index + 1} of ${f.list.length}${f.next ? "+" : ""}`);
      for (const [label, sign, step] of [["Previous match", "↑", -1], ["Next match", "↓", 1]]) {
        const b = document.createElement("button");
        b.type = "button";
        b.textContent = sign;
        b.setAttribute("aria-label", label);
        b.onclick = () => this.hit(f.index + step);
        box.append(b);
      }
    }
  }

  // Controls

  controls() {
    const form = document.querySelector(".search");
    form.onsubmit = e => {
      e.preventDefault();
      const q = form.elements.q.value;
      if (this.found && this.found.q === q && this.found.list.length) this.hit(this.found.index + 1);
      else this.search(q);
    };
    form.elements.q.oninput = () => form.elements.q.value || this.search("");
    const acts = document.getElementById("logacts");
    this.note = document.createElement("span");
    this.note.setAttribute("role", "status");
    this.button = document.createElement("button");
    this.button.type = "button";
    this.button.id = "follow";
    this.button.hidden = true;
    this.button.onclick = () => {
      this.follow = !this.follow;
      if (this.follow) this.to(Infinity);
      this.buttons();
    };
    for (const e of acts.querySelectorAll("span, button")) e.remove();
    acts.prepend(this.note, this.button);
  }

  buttons() {
    this.button.hidden = !this.live;
    this.button.textContent = this.follow ? "Pause following" : "Follow";
  }

  say(text) { if (this.note.textContent !== text) this.note.textContent = text; }

  async step(i) {
    try {
      const s = await this.ask({step: i, from: 1, limit: 1});
      if (s.lines && s.lines.length) {
        this.to((s.lines[0].n - 1) * rowHeight);
        this.follow = false;
        this.buttons();
        this.box.focus({preventScroll: true});
        this.box.scrollIntoView({block: "nearest"});
      }
    } catch (e) {
      this.say("The log cannot be read now.");
    }
  }
}

function stepName(i) {
  const e = document.querySelector(`#step-${i} .title`);
  return e ? e.textContent : i < 0 ? "Runner" : "Step " + (i + 1);
}

function begin() {
  if (viewer) viewer.stop();
  viewer = null;
  const box = document.getElementById("lines");
  if (box && !new URLSearchParams(location.search).has("q") && !new URLSearchParams(location.search).has("step")) viewer = new Viewer(box);
}

if (section) {
  begin();
  addEventListener("hashchange", () => viewer && viewer.hash());
  addEventListener("click", e => {
    const step = e.target.closest(".steps a.title");
    if (step && viewer && !e.ctrlKey && !e.metaKey && !e.shiftKey) {
      e.preventDefault();
      viewer.step(+step.closest("li").dataset.step);
      return;
    }
    const n = e.target.closest(".lines a.n");
    if (n && viewer && e.shiftKey && viewer.chosen) {
      e.preventDefault();
      const b = +n.textContent, a = viewer.chosen[0];
      location.hash = a === b ? `#L${a}` : `#L${Math.min(a, b)}-L${Math.max(a, b)}`;
    }
  });
  // An attempt that began after the page was loaded brings its log with it.
  document.addEventListener("forgeci:fresh", () => {
    const shown = document.getElementById("job").dataset.shown;
    if (shown !== section.dataset.attempt && !new URLSearchParams(location.search).has("attempt")) location.reload();
  });
}
