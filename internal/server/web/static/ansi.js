// Text of a log, terminal control included, into lines of safe spans: the same
// rules as package ansi of the server, held together by its testdata/cases.json.
// A span is {c: classes, h: link, t: text}; nothing here touches the page.

export const maxColumns = 16384;
const maxCSI = 256, maxOSC = 8192, maxLink = 2048, maxMarks = 16;

const isMark = c => c >= 0x300 && /^\p{M}$/u.test(String.fromCodePoint(c)) || c === 0x200c || c === 0x200d;

function deceptive(c) {
  return c === 0xad || c === 0x61c || c === 0x180e || c === 0xfeff || c === 0x200b ||
    c >= 0x200e && c <= 0x200f || c >= 0x2028 && c <= 0x202e || c >= 0x2060 && c <= 0x206f ||
    c >= 0xfff9 && c <= 0xfffb || c >= 0xe0000 && c <= 0xe007f;
}

function visible(c) {
  if (c === 9) return "";
  if (c < 0x20) return "^" + String.fromCharCode(c + 0x40);
  if (c === 0x7f) return "^?";
  if (c >= 0x80 && c < 0xa0 || deceptive(c)) return "\u27e8U+" + c.toString(16).toUpperCase().padStart(4, "0") + "\u27e9";
  return "";
}

// Pens are immutable and compared by identity: one object for each look.
const pens = new Map();
function intern(p) {
  const key = [p.fore, p.back, +p.bold, +p.dim, +p.italic, +p.under, +p.strike, +p.inverse, +p.named, p.href].join();
  let q = pens.get(key);
  if (!q) {
    if (pens.size > 5000) pens.clear();
    p.class = classOf(p);
    pens.set(key, q = p);
  }
  return q;
}
const plain = {fore: 0, back: 0, bold: false, dim: false, italic: false, under: false, strike: false, inverse: false, named: false, href: "", class: ""};

function classOf(p) {
  const b = [];
  if (p.named) b.push("ctl");
  if (p.inverse) {
    b.push(p.back ? "f" + (p.back - 1) : "fx", "k", p.fore ? "b" + (p.fore - 1) : "bx");
  } else {
    if (p.fore) b.push("f" + (p.fore - 1));
    if (p.back) b.push("k", "b" + (p.back - 1));
  }
  if (p.bold) b.push("bo");
  if (p.dim) b.push("di");
  if (p.italic) b.push("it");
  if (p.under) b.push("un");
  if (p.strike) b.push("st");
  return b.join(" ");
}

function number(s) {
  if (!/^[0-9]*$/.test(s)) return 9999;
  return s === "" ? 0 : Math.min(parseInt(s, 10), 9999);
}

function step(v) {
  if (v < 48) return [0, 0];
  if (v < 115) return [1, 95];
  const i = Math.floor((v - 35) / 40);
  return [i, 55 + i * 40];
}

function nearest(rs, gs, bs) {
  const r = number(rs), g = number(gs), b = number(bs);
  if (r > 255 || g > 255 || b > 255) return 0;
  const [ri, rl] = step(r), [gi, gl] = step(g), [bi, bl] = step(b);
  const distance = (x, y, z) => (r - x) ** 2 + (g - y) ** 2 + (b - z) ** 2;
  const grey = Math.min(Math.max(Math.trunc((Math.trunc((r + g + b) / 3) - 3) / 10), 0), 23);
  const level = 8 + grey * 10;
  if (distance(level, level, level) < distance(rl, gl, bl)) return 232 + grey + 1;
  return 16 + 36 * ri + 6 * gi + bi + 1;
}

const indexed = s => { const n = number(s); return n > 255 ? 0 : n + 1; };

function extended(params) {
  if (params.length === 0) return [0, 0];
  switch (number(params[0])) {
    case 5: return params.length < 2 ? [0, params.length] : [indexed(params[1]), 2];
    case 2: return params.length < 4 ? [0, params.length] : [nearest(params[1], params[2], params[3]), 4];
  }
  return [0, 1];
}

function extendedColons(parts) {
  const n = number(parts[0]);
  if (n === 5 && parts.length >= 2) return indexed(parts[1]);
  if (n === 2 && parts.length === 4) return nearest(parts[1], parts[2], parts[3]);
  if (n === 2 && parts.length >= 5) return nearest(parts[2], parts[3], parts[4]);
  return 0;
}

function simple(p, n) {
  if (n === 0) Object.assign(p, plain, {href: p.href});
  else if (n === 1) p.bold = true;
  else if (n === 2) p.dim = true;
  else if (n === 3) p.italic = true;
  else if (n === 4 || n === 21) p.under = true;
  else if (n === 7) p.inverse = true;
  else if (n === 9) p.strike = true;
  else if (n === 22) p.bold = p.dim = false;
  else if (n === 23) p.italic = false;
  else if (n === 24) p.under = false;
  else if (n === 27) p.inverse = false;
  else if (n === 29) p.strike = false;
  else if (n >= 30 && n <= 37) p.fore = n - 30 + 1;
  else if (n === 39) p.fore = 0;
  else if (n >= 40 && n <= 47) p.back = n - 40 + 1;
  else if (n === 49) p.back = 0;
  else if (n >= 90 && n <= 97) p.fore = n - 90 + 8 + 1;
  else if (n >= 100 && n <= 107) p.back = n - 100 + 8 + 1;
}

function sgr(pen, text) {
  const p = {...pen}, params = text.split(";");
  for (let i = 0; i < params.length; i++) {
    const parts = params[i].split(":"), n = number(parts[0]);
    if (n === 38 || n === 48 || n === 58) {
      let c = 0;
      if (parts.length > 1) c = extendedColons(parts.slice(1));
      else {
        const [color, used] = extended(params.slice(i + 1, i + 5));
        c = color;
        i += used;
      }
      if (n === 38 && c) p.fore = c;
      else if (n === 48 && c) p.back = c;
    } else if (n === 4 && parts.length > 1) p.under = number(parts[1]) !== 0;
    else simple(p, n);
  }
  return intern(p);
}

function acceptable(url) {
  return url.length <= maxLink && /^https?:\/\/[^/?#:@]/i.test(url) && /^[!-~]+$/.test(url) && !/["'<>\\`]/.test(url);
}

function link(text) {
  if (!text.startsWith("8;")) return null;
  const at = text.indexOf(";", 2);
  if (at < 0) return null;
  const url = text.slice(at + 1);
  return {link: acceptable(url) ? url : ""};
}

const ground = 0, escape = 1, skip = 2, csi = 3, osc = 4, blob = 5;

class Parser {
  state = ground;
  buf = "";
  private = false;
  tail = false;

  set(state) {
    this.state = state;
    this.buf = "";
    this.private = this.tail = false;
  }

  // next takes a character; it returns true when the character is text, an
  // action, or nothing.
  next(c) {
    if (c === 0x18 || c === 0x1a) return void this.set(ground);
    if (this.state === osc || this.state === blob) return this.text(c);
    if (c === 0x1b) return void this.set(escape);
    switch (this.state) {
      case ground:
        return void this.set(csi);
      case escape:
        if (c === 0x5b) this.set(csi);
        else if (c === 0x5d) this.set(osc);
        else if (c === 0x50 || c === 0x58 || c === 0x5e || c === 0x5f) this.set(blob);
        else if (c >= 0x20 && c <= 0x2f) this.set(skip);
        else {
          this.set(ground);
          return c < 0x20 || c > 0x7e;
        }
        return;
      case skip:
        if (c < 0x20 || c > 0x2f) {
          this.set(ground);
          return c > 0x7e || c < 0x20;
        }
        return;
      case csi:
        return this.control(c);
    }
  }

  control(c) {
    if (c >= 0x30 && c <= 0x3b) {
      if (this.buf.length === maxCSI) {
        this.set(ground);
        return true;
      }
      this.buf += String.fromCharCode(c);
      return;
    }
    if (c >= 0x20 && c <= 0x2f || c >= 0x3c && c <= 0x3f) {
      this.private = true;
      return;
    }
    let a;
    if (c >= 0x40 && c <= 0x7e) {
      if (!this.private && c === 0x6d) a = {sgr: this.buf};
      else if (!this.private && c === 0x4b) a = {erase: this.buf};
    } else a = true;
    this.set(ground);
    return a;
  }

  text(c) {
    if (this.tail && c === 0x5c || c === 0x07 || c === 0x9c) {
      const a = this.state === osc ? link(this.buf) : null;
      this.set(ground);
      return a || undefined;
    }
    if (this.tail) {
      this.set(escape);
      return this.next(c);
    }
    if (c === 0x1b) this.tail = true;
    else if (this.buf.length < maxOSC) this.buf += String.fromCodePoint(c);
  }
}

// Renderer keeps the state of one stream. Text may come in pieces.
export class Renderer {
  pen = plain;
  parser = new Parser();
  texts = [];
  pens = [];
  column = 0;
  cut = 0;

  // feed takes the next piece of text and returns the lines it completed.
  feed(text) {
    const done = [];
    for (const s of text) {
      if (s === "\n") done.push(this.end());
      else this.put(s);
    }
    return done;
  }

  // line renders one line, given without its line end.
  line(text) {
    if (this.pen === plain && this.parser.state === ground && this.texts.length === 0 && text.length < maxColumns && /^[\x20-\x7e\t]*$/.test(text)) {
      return {s: text === "" ? [] : [{t: text}]};
    }
    for (const s of text) if (s !== "\n") this.put(s);
    return this.end();
  }

  // pending returns the line being written as it looks now.
  pending() { return this.render(); }

  end() {
    const l = this.render();
    this.texts = [];
    this.pens = [];
    this.column = this.cut = 0;
    this.parser.set(ground);
    return l;
  }

  put(s) {
    const c = s.codePointAt(0);
    if (this.parser.state !== ground || c === 0x1b || c === 0x9b) {
      const a = this.parser.next(c);
      if (a !== true) {
        if (a) this.apply(a);
        return;
      }
    }
    if (c === 13) this.column = 0;
    else if (c === 8) this.column = Math.max(this.column - 1, 0);
    else if (c >= 0x20 && c < 0x7f) this.print(s, this.pen);
    else if (isMark(c)) this.mark(s);
    else {
      const name = visible(c);
      if (name) this.print(name, intern({...this.pen, named: true}));
      else this.print(s, this.pen);
    }
  }

  print(s, pen) {
    if (this.column >= maxColumns) {
      this.cut++;
      return;
    }
    while (this.texts.length < this.column) {
      this.texts.push(" ");
      this.pens.push(plain);
    }
    this.texts[this.column] = s;
    this.pens[this.column] = pen;
    this.column++;
  }

  mark(s) {
    const at = Math.min(this.column, this.texts.length) - 1;
    if (at < 0) return this.print("\u25cc" + s, this.pen);
    if ([...this.texts[at]].length > maxMarks) this.cut++;
    else this.texts[at] += s;
  }

  apply(a) {
    if (a.sgr !== undefined) this.pen = sgr(this.pen, a.sgr);
    else if (a.erase !== undefined) this.erase(a.erase);
    else this.pen = intern({...this.pen, href: a.link});
  }

  erase(param) {
    const n = this.texts.length;
    if (param === "" || param === "0") this.texts.length = this.pens.length = Math.min(this.column, n);
    else if (param === "1") {
      for (let i = 0; i < Math.min(this.column + 1, n); i++) {
        this.texts[i] = " ";
        this.pens[i] = plain;
      }
    } else if (param === "2") this.texts.length = this.pens.length = 0;
    if (this.column < maxColumns) this.cut = 0;
  }

  render() {
    const s = [];
    for (let i = 0; i < this.texts.length;) {
      const p = this.pens[i], from = i;
      while (i < this.texts.length && this.pens[i] === p) i++;
      const span = {t: this.texts.slice(from, i).join("")};
      if (p.class) span.c = p.class;
      if (p.href) span.h = p.href;
      s.push(span);
    }
    const l = {s};
    if (this.cut) l.cut = this.cut;
    return l;
  }
}
