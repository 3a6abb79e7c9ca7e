// The page of the server: what there is to ask and to search, and what happens when the server goes away.

import { knowledgeBases, memories, models, RequestError } from "./api.js";
import * as chat from "./chat.js";
import * as memory from "./memory.js";
import { notice } from "./notice.js";
import { load, save } from "./session.js";
import * as settings from "./settings.js";
import { count, element, visible } from "./text.js";

const LONGEST_PAUSE = 15; // seconds between two tries to reach a server that is away
const find = (id) => document.getElementById(id);
const [model, where, choices] = ["model", "where", "choices"].map(find);

let places = []; // {value, name, size}: what can be searched
let isWatching = false;

// The number of texts in the memory, or null where the server has none.
async function memorySize() {
  try {
    return (await memories({ limit: 1, offset: 0 })).total;
  } catch (error) {
    if (error.kind === "refused") return null;
    throw error;
  }
}

function showModels(ids) {
  model.replaceChildren(...ids.map((id) => new Option(visible(id), id)));
  const chosen = load("model", "");
  if (ids.includes(chosen)) model.value = chosen;
  model.hidden = ids.length === 0;
  model.disabled = ids.length < 2;
}

const label = ({ name, size }) => (size === null ? name : `${name} (${size.toLocaleString("en")})`);

function showPlaces() {
  const chosen = load("where", "");
  const option = (place) => new Option(label(place), place.value);
  const bases = places.filter((place) => place.value.startsWith("kb:"));
  const group = element("optgroup");
  group.label = "Knowledge bases";
  group.append(...bases.map(option));
  where.replaceChildren(
    ...places.filter((place) => !bases.includes(place)).map(option),
    ...(bases.length ? [group] : []),
  );
  where.value = places.some((place) => place.value === chosen) ? chosen : "";
  if (where.value !== chosen) notice(`${visible(chosen.replace("kb:", ""))} is no longer there to search.`);
  showChoices();
  choose();
}

// What can be searched, as buttons of the empty page.
function showChoices() {
  const made = places.slice(1, 7).map(({ value, name, size }) => {
    const item = element("li");
    const button = element("button");
    button.type = "button";
    button.dataset.value = value;
    const unit = value === "memory" ? ["text", "texts"] : ["document", "documents"];
    button.append(element("strong", name), element("span", size === null ? "" : count(size, ...unit)));
    button.addEventListener("click", () => {
      where.value = where.value === value ? "" : value;
      choose();
      find("question").focus();
    });
    item.append(button);
    return item;
  });
  choices.replaceChildren(...made);
  choices.hidden = !made.length;
}

function choose() {
  save("where", where.value);
  find("look-up").hidden = !where.value;
  for (const button of choices.querySelectorAll("button")) {
    button.setAttribute("aria-pressed", String(button.dataset.value === where.value));
  }
}

async function readServer() {
  const [found, bases, size] = await Promise.all([models(), knowledgeBases(), memorySize()]);
  showModels(found.data.filter(({ kind }) => kind !== "embeddings").map(({ id }) => id));
  document.body.classList.toggle("no-memory", size === null);
  memory.showSize(size);
  places = [
    { value: "", name: "Nothing", size: null },
    ...(size === null ? [] : [{ value: "memory", name: "Memory", size }]),
    ...bases.data.map(({ id, documents }) => ({ value: `kb:${id}`, name: visible(id), size: documents ?? null })),
  ];
  showPlaces();
  if (find("memory").open) memory.refresh();
}

// Read what the server has; ask for its key if it wants one, and wait for it if it is away.
async function connect() {
  try {
    await readServer();
    return true;
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    if (error.kind !== "key") watch(error);
    else if (await settings.askKey(error.message)) return connect();
    else notice(error.message, { label: "Enter the key", act: connect, isError: true });
    return false;
  }
}

// Try again, with longer pauses, until the server answers.
async function watch(error) {
  if (isWatching) return;
  isWatching = true;
  let told = null;
  for (let pause = error ? 1 : 0; ; pause = Math.min(2 * pause || 1, LONGEST_PAUSE)) {
    if (error && error.message !== told) notice(`${error.message} Trying again until it answers.`, { isError: true });
    told = error?.message; // said once, so that it can be closed
    await new Promise((resolve) => setTimeout(resolve, 1000 * pause));
    try {
      await readServer();
      if (error) notice("The server is back.");
      break;
    } catch (caught) {
      if (!(caught instanceof RequestError)) throw caught;
      error = caught;
      if (error.kind === "key") break;
    }
  }
  isWatching = false;
  if (error?.kind === "key") await connect();
}

function setMemorySize(size) {
  memory.showSize(size);
  const place = places.find(({ value }) => value === "memory");
  if (!place || place.size === size) return;
  place.size = size;
  showPlaces();
}

model.addEventListener("change", () => save("model", model.value));
where.addEventListener("change", choose);
settings.start(connect);
memory.start(setMemorySize);
chat.start({
  place: () => {
    const value = where.value;
    const name = value === "memory" ? "the memory" : visible(value.slice(3));
    return { model: model.value, where: value, name };
  },
  lost: () => watch(null),
  remembered: () => memory.refresh(),
});
addEventListener("unhandledrejection", ({ reason }) => {
  notice(`This page has failed: ${reason?.message ?? reason}. Load it again.`, { isError: true });
});
find("question").focus({ preventScroll: true }); // a low window shows its top first
connect();
