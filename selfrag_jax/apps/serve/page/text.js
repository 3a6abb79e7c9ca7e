// Text that nobody has checked, shown as text: no string ever becomes markup, and no link leaves the page.

// Characters that reorder or hide their neighbours, which a file name could use to look like another one.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u2069\ufeff]/g;

// One line of text with such characters written out.
export function visible(text) {
  const escaped = (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`;
  return String(text)
    .replace(/[\t\n]+/g, " ")
    .replace(HIDDEN, escaped);
}

export function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// A copy of a template's only element.
export const copyOf = (id) => document.getElementById(id).content.firstElementChild.cloneNode(true);

const NUMBER = String.raw`(?:doc(?:ument)?[\s_]*)?\d{1,4}`;
const INLINE = new RegExp(
  String.raw`\x60([^\x60\n]+)\x60|\*\*([^*\s](?:[^*\n]*[^*\s])?)\*\*|\[\s*(${NUMBER}(?:\s*[,;]\s*${NUMBER})*)\s*\]`,
  "gi",
);
const FENCE = /^\s*```/;
const HEADING = /^#{1,6} +(.+)$/;

// [1], [1, 2] and [Document 1]: each number that names a source becomes a link to it.
function citation(text, link) {
  const made = element("span", undefined, text.length < 20 ? "citations" : undefined);
  const pieces = /^\[\s*\d+\s*\]$/.test(text) ? [text] : text.split(/(\d+)/);
  for (const piece of pieces) {
    const number = piece.match(/\d+/);
    made.append((number && link(Number(number[0]), piece)) || piece);
  }
  return made;
}

function inline(parent, text, link) {
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, code, bold] = match;
    parent.append(text.slice(at, match.index));
    if (code !== undefined) parent.append(element("code", code));
    else if (bold !== undefined) parent.append(element("strong", bold));
    else parent.append(citation(whole, link));
    at = match.index + whole.length;
  }
  parent.append(text.slice(at));
}

// Blocks of a text: fenced code, headings, and paragraphs between blank lines. An open fence is code already.
function blocks(text) {
  const found = [];
  let lines = null;
  let isCode = false;
  for (const line of text.split(/\r\n|\n|\r/)) {
    if (FENCE.test(line)) {
      isCode = !isCode;
      lines = null;
      if (isCode) found.push({ isCode, lines: (lines = []) });
    } else if (!isCode && !line.trim()) {
      lines = null;
    } else if (!isCode && HEADING.test(line)) {
      lines = null;
      found.push({ isCode, lines: [line] });
    } else {
      if (!lines) found.push({ isCode, lines: (lines = []) });
      lines.push(line);
    }
  }
  return found.map(({ isCode, lines }) => ({ isCode, text: lines.join("\n") }));
}

function render({ isCode, text }, link) {
  if (isCode) {
    const made = element("pre");
    made.tabIndex = 0; // wide code scrolls sideways, by keyboard too
    made.append(element("code", text));
    return made;
  }
  const heading = text.match(HEADING);
  const made = element("p", undefined, heading ? "heading" : undefined);
  made.dir = "auto";
  inline(made, heading ? heading[1] : text, link);
  return made;
}

const shown = new WeakMap(); // element of a block -> what it was made from

// Show a text in `parent`. Blocks that stand there already stay: a stream of tokens only touches the last one.
// `link(number, text)` returns the link of a citation, or null.
export function showText(parent, text, link = null) {
  const wanted = blocks(text);
  wanted.forEach((block, i) => {
    const key = JSON.stringify([block.isCode, block.text, link !== null]);
    const old = parent.children[i];
    if (old && shown.get(old) === key) return;
    const made = render(block, link ?? (() => null));
    shown.set(made, key);
    if (old) old.replaceWith(made);
    else parent.append(made);
  });
  while (parent.children.length > wanted.length) parent.lastElementChild.remove();
}

export const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;
