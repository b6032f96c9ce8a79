// What makes every page live: one event stream while the page is seen, times
// that go on, and the graph's tracing. A page is right without any of it; all it
// does is ask the server for the page's main part again.

import {Stream} from "./stream.js";

const main = document.getElementById("main");
const note = document.getElementById("live");

// say shows a message about the connection, or none.
function say(text) {
  if (!note || note.textContent === text) return;
  note.textContent = text;
  note.hidden = !text;
}

// load asks for the main part of this page. XMLHttpRequest parses it into a
// document that runs nothing, so no text is ever made into HTML here.
function load() {
  return new Promise((resolve, reject) => {
    const url = new URL(location.href);
    url.searchParams.set("fragment", "1");
    url.hash = "";
    const x = new XMLHttpRequest();
    x.open("GET", url);
    x.responseType = "document";
    x.timeout = 15000;
    x.onload = () => x.status === 200 && x.response ? resolve(x.response) : reject(Object.assign(new Error("status " + x.status), {status: x.status}));
    x.onerror = x.ontimeout = () => reject(new Error("network"));
    x.send();
  });
}

// morph makes old like fresh in place: elements keep their identity by ID, so
// focus, selection, open details and scroll positions stay.
function morph(old, fresh) {
  if (old.hasAttribute("data-keep")) return;
  for (const a of [...old.attributes]) {
    if (!fresh.hasAttribute(a.name) && !(a.name === "open" && old.localName === "details")) old.removeAttribute(a.name);
  }
  for (const a of fresh.attributes) {
    if (old.getAttribute(a.name) !== a.value && !(a.name === "open" && old.localName === "details")) old.setAttribute(a.name, a.value);
  }
  const byID = new Map();
  for (const c of old.children) if (c.id) byID.set(c.id, c);
  let at = old.firstChild;
  for (const want of [...fresh.childNodes]) {
    let have = want.id ? byID.get(want.id) : at;
    if (have && (have.nodeType !== want.nodeType || have.nodeName !== want.nodeName || (have.id || "") !== (want.id || ""))) have = null;
    if (!have) {
      old.insertBefore(document.importNode(want, true), at);
      continue;
    }
    if (have !== at) old.insertBefore(have, at);
    else at = at.nextSibling;
    if (want.nodeType === Node.ELEMENT_NODE) {
      if (!have.isEqualNode(want)) morph(have, want);
    } else if (have.data !== want.data) have.data = want.data;
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

let loading = false, again = false, last = 0;

// refresh brings the page up to date; calls while one is under way make one more.
export async function refresh() {
  if (loading) {
    again = true;
    return;
  }
  loading = true;
  try {
    const took = performance.now();
    const fresh = await load();
    morph(main, fresh.getElementById("main"));
    if (document.title !== fresh.title) document.title = fresh.title;
    const events = fresh.body.dataset.events || "";
    if (events !== (document.body.dataset.events || "")) {
      document.body.dataset.events = events;
      listen();
    }
    say("");
    tick();
    last = performance.now();
    document.dispatchEvent(new CustomEvent("forgeci:fresh"));
    // A page that is heavy to bring up to date is asked for less often.
    await new Promise(r => setTimeout(r, Math.min(Math.max((last - took) * 3, 200), 3000)));
  } catch (e) {
    if (e.status === 401) say("Signed out. Reload the page to sign in.");
    else if (e.status === 404) say("This is no longer there.");
    else {
      say("Not up to date: the server cannot be reached.");
      setTimeout(refresh, 3000);
    }
  } finally {
    loading = false;
    if (again) {
      again = false;
      refresh();
    }
  }
}

let stream = null;
let paused = false;

// listen holds the page's one stream. While another part of the page has a
// stream of its own (the log), this one is closed.
function listen() {
  if (stream) stream.close();
  stream = null;
  const url = document.body.dataset.events;
  if (!url || paused) return;
  stream = new Stream(() => document.body.dataset.events, {
    change: refresh,
    $lost: () => say("Reconnecting…"),
    $back: () => say(""),
    $denied: () => say("Signed out. Reload the page to sign in."),
  });
}

// yieldStream lets the log viewer have the page's one connection.
export function yieldStream(yes) {
  if (paused === yes) return;
  paused = yes;
  listen();
}

// The server's clock is the one that counts.
const skew = Date.parse(document.body.dataset.now) - Date.now();

// tick moves the times of the page on.
function tick() {
  const now = Date.now() + skew;
  for (const t of document.querySelectorAll("time[data-ago]")) {
    const text = ago(now - Date.parse(t.dateTime));
    if (text && t.textContent !== text) t.textContent = text;
  }
  for (const t of document.querySelectorAll("[data-since]")) {
    const text = duration(now - Date.parse(t.dataset.since));
    if (t.textContent !== text) t.textContent = text;
  }
}

function duration(ms) {
  const s = Math.max(ms / 1000, 0), two = n => String(Math.floor(n)).padStart(2, "0");
  if (s < 60) return Math.floor(s) + " s";
  if (s < 3600) return Math.floor(s / 60) + " min " + two(s % 60) + " s";
  if (s < 48 * 3600) return Math.floor(s / 3600) + " h " + two(s / 60 % 60) + " min";
  return Math.floor(s / 86400) + " days";
}

function ago(ms) {
  const s = ms / 1000;
  if (s < 5) return "just now";
  if (s < 60) return Math.floor(s) + " s ago";
  if (s < 3600) return Math.floor(s / 60) + " min ago";
  if (s < 86400) return Math.floor(s / 3600) + " h ago";
  if (s < 14 * 86400) return Math.floor(s / 86400) + " d ago";
  return "";
}

// Tracing: a node under the pointer shows what it comes after and what comes
// after it.
function trace(node) {
  const box = document.querySelector(".graph");
  if (!box) return;
  for (const e of box.querySelectorAll(".on")) e.classList.remove("on");
  box.classList.toggle("tracing", !!node);
  if (!node) return;
  const edges = [...box.querySelectorAll(".edge")];
  const walk = (start, near, far) => {
    const seen = new Set(), todo = [start];
    const from = e => e.dataset[near] || "joint " + e.dataset.joint, to = e => e.dataset[far] || "joint " + e.dataset.joint;
    while (todo.length) {
      const k = todo.pop();
      if (seen.has(k)) continue;
      seen.add(k);
      for (const e of edges) if (from(e) === k) {
        e.classList.add("on");
        todo.push(to(e));
      }
    }
    for (const n of box.querySelectorAll(".node")) if (seen.has(n.dataset.key)) n.classList.add("on");
  };
  walk(node.dataset.key, "from", "to");
  walk(node.dataset.key, "to", "from");
}

document.addEventListener("pointerover", e => {
  const node = e.target.closest && e.target.closest(".node");
  if (node !== trace.node) trace(trace.node = node);
});

// A link to a folded matrix opens it.
addEventListener("hashchange", unfold);
function unfold() {
  const g = location.hash.startsWith("#g-") && document.getElementById(location.hash.slice(1));
  if (g) {
    g.querySelector("details").open = true;
    g.querySelector("summary").focus();
  }
}

setInterval(() => { if (!document.hidden) tick(); }, 1000);
// A large graph shows first what is going on or went wrong.
const graph = document.querySelector(".graph");
if (graph) {
  const node = graph.querySelector(".node.s-failed, .node.s-timed_out, .node.s-aborted, .node.s-running") || graph.querySelector(".node");
  const a = node.getBoundingClientRect(), b = graph.getBoundingClientRect();
  graph.scrollTop = a.top - b.top - b.height / 2;
  if (a.right > b.right) graph.scrollLeft = a.left - b.left - b.width / 2;
}
unfold();
listen();
