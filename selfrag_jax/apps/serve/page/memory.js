// The panel of the memory: what it holds, and adding, changing and deleting texts.

import { change, forget, memories, remember, RequestError } from "./api.js";
import { announce } from "./notice.js";
import { askKey } from "./settings.js";
import { copyOf, count, element, visible } from "./text.js";
import { scoreText } from "./turn.js";

const PAGE = 20; // texts that are shown at once
const PAUSE = 300; // milliseconds without a keystroke before a search
const find = (id) => document.getElementById(id);
const [panel, opener, list, status, more, recall, add] = [
  "memory",
  "open-memory",
  "memories",
  "memory-status",
  "more",
  "recall",
  "add",
].map(find);
const isWide = matchMedia("(min-width: 64rem)");

let reading = null; // the AbortController of the list that is being read
let changed = null; // is called with the number of texts after each change

// Do it, asking for the key if the server does. Returns whether it was done; if not, `tell` shows why.
async function attempt(act, tell) {
  try {
    await act();
    tell("");
    return true;
  } catch (error) {
    if (error.name === "AbortError") return false;
    if (!(error instanceof RequestError)) throw error;
    if (error.kind === "key" && (await askKey(error.message))) return attempt(act, tell);
    tell(error.message);
    return false;
  }
}

const tellIn = (place) => (message) => (place.textContent = message);

// Why the list could not be read, with a button: there is no form to send again.
function tellOfList(message) {
  if (!message) return;
  const again = element("button", "Try again");
  again.type = "button";
  again.addEventListener("click", () => refresh());
  status.replaceChildren(element("span", message, "problem"), again);
}

function statusText(total, query) {
  if (query)
    return total ? `${count(total, "text", "texts")} found, the closest first` : "Nothing like this is in the memory.";
  return total
    ? count(total, "text", "texts")
    : "Nothing yet. What you add here can be found by every chat that searches the memory.";
}

// Read the list anew, or its next page.
export async function refresh({ isMore = false } = {}) {
  reading?.abort();
  reading = new AbortController();
  const { signal } = reading;
  const query = recall.value.trim();
  const offset = isMore ? list.children.length : 0;
  await attempt(async () => {
    const { data, total } = await memories({ limit: PAGE, offset, ...(query && { query }) }, signal);
    const items = data.map(makeItem);
    if (isMore) list.append(...items);
    else list.replaceChildren(...items);
    items.forEach(offerWhole);
    status.textContent = statusText(total, query);
    more.hidden = offset + data.length >= total || !data.length;
    if (isMore) items[0]?.querySelector(".edit").focus();
    if (!query) {
      changed(total);
    }
  }, tellOfList);
}

// An empty memory has nothing to search, and something to add.
export function showSize(total) {
  find("recall-form").hidden = total === 0;
  if (total === 0) add.open = true;
}

// A long passage is cut by the style sheet; a button shows the rest.
function offerWhole(item) {
  const passage = item.querySelector(".passage");
  item.querySelector(".whole").hidden = passage.scrollHeight <= passage.clientHeight + 1;
}

function makeItem(memory) {
  const item = copyOf("memory-template");
  const part = (name) => item.querySelector(name);
  const [passage, editor, confirm, whole] = [".passage", ".editor", ".confirm", ".whole"].map(part);
  const name = visible(memory.text).slice(0, 60);
  const tell = tellIn(part(".problem"));
  passage.textContent = memory.text;
  part(".place").textContent = visible(memory.source ?? "").slice(0, 300);
  part(".score").textContent = typeof memory.score === "number" ? `score ${scoreText(memory.score)}` : "";
  for (const [selector, verb] of [
    [".edit", "Edit"],
    [".delete", "Delete"],
    [".whole", "Show all"],
  ]) {
    part(selector).setAttribute("aria-label", `${verb}: ${name}`);
  }

  whole.addEventListener("click", () => {
    const isOpen = item.classList.toggle("is-whole");
    whole.textContent = isOpen ? "Show less" : "Show all";
    whole.setAttribute("aria-label", `${whole.textContent}: ${name}`);
    whole.setAttribute("aria-expanded", String(isOpen));
  });

  // one of: the text, its editor, the question whether to delete it
  const show = (shown, focused) => {
    for (const hidden of [editor, confirm]) hidden.hidden = hidden !== shown;
    passage.hidden = shown === editor;
    part(".acts").hidden = shown !== null;
    tell("");
    focused.focus();
  };
  const field = editor.querySelector("textarea");
  part(".edit").addEventListener("click", () => {
    field.value = memory.text;
    show(editor, field);
  });
  part(".delete").addEventListener("click", () => show(confirm, part(".keep")));
  part(".keep").addEventListener("click", () => show(null, part(".delete")));
  part(".editor .cancel").addEventListener("click", () => show(null, part(".edit")));
  item.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || (editor.hidden && confirm.hidden)) return;
    event.preventDefault();
    event.stopPropagation(); // it closes this, not the panel around it
    show(null, part(editor.hidden ? ".delete" : ".edit"));
  });

  editor.addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = field.value.trim();
    let saved = null;
    if (!(await attempt(async () => (saved = await change(memory.id, text)), tell))) return;
    const fresh = makeItem({ ...memory, text, ...saved });
    item.replaceWith(fresh);
    offerWhole(fresh);
    fresh.querySelector(".edit").focus();
    announce("Saved");
  });
  part(".danger").addEventListener("click", async () => {
    if (!(await attempt(() => forget(memory.id), tell))) return;
    const next = item.nextElementSibling ?? item.previousElementSibling;
    item.remove();
    (next?.querySelector(".delete") ?? recall).focus();
    announce("Deleted");
    await refreshCount();
  });
  return item;
}

// The number of texts after a change of one; the list stays where it is.
async function refreshCount() {
  await attempt(async () => {
    const { total } = await memories({ limit: 1, offset: 0 });
    if (!recall.value.trim()) status.textContent = statusText(total, "");
    more.hidden = list.children.length >= total || recall.value.trim() !== "";
    changed(total);
  }, tellOfList);
}

// Beside the chat where there is room, else over it as a modal sheet.
function open() {
  if (isWide.matches) panel.show();
  else panel.showModal();
  opener.setAttribute("aria-expanded", "true");
  document.body.classList.add("has-memory");
}

function close() {
  panel.close();
}

export function start(onChange) {
  changed = onChange;
  opener.addEventListener("click", () => {
    if (panel.open) return close();
    open();
    (find("recall-form").hidden ? find("add-text") : recall).focus();
    return refresh();
  });
  find("close-memory").addEventListener("click", close);
  panel.addEventListener("close", () => {
    if (panel.open) return; // opened again already, in its other form
    opener.setAttribute("aria-expanded", "false");
    document.body.classList.remove("has-memory");
    // the event comes late: the dialog has given the focus back, and who is fast has moved it on
    if (document.activeElement === document.body) opener.focus();
  });
  panel.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || recall.value) return; // Escape empties a search field first
    event.stopPropagation();
    close();
  });
  isWide.addEventListener("change", () => {
    if (!panel.open) return;
    panel.close();
    open();
  });
  let timer = 0;
  recall.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(refresh, PAUSE);
  });
  more.addEventListener("click", () => refresh({ isMore: true }));
  find("add-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const [text, source] = [find("add-text"), find("add-source")];
    if (
      !(await attempt(
        () => remember(text.value.trim(), source.value.trim()),
        tellIn(find("add").querySelector(".problem")),
      ))
    )
      return;
    text.value = "";
    source.value = "";
    recall.value = "";
    text.focus();
    announce("Remembered");
    await refresh();
  });
}
