// The settings of an answer, and the key of the server.

import { load, save } from "./session.js";

const DEFAULTS = { temperature: 0, max_tokens: null, top_k: 5, seed: null };
const find = (id) => document.getElementById(id);
const [dialog, form, keyDialog, keyForm] = ["settings", "settings-form", "key", "key-form"].map(find);

export const settings = () => ({ ...DEFAULTS, ...load("settings", {}) });

function fill(values) {
  for (const name of Object.keys(DEFAULTS)) form.elements[name].value = values[name] ?? "";
}

function showKey() {
  find("key-state").textContent = load("key", "") ? "API key: set" : "API key: none";
}

function open() {
  fill(settings());
  showKey();
  dialog.showModal();
  form.elements.temperature.focus();
}

let decide = null; // resolves the promise of the key that is asked for

// Ask for the server's key. Resolves to whether one was given.
export function askKey(reason) {
  find("key-reason").textContent = reason;
  find("key-value").value = "";
  keyDialog.returnValue = "";
  if (!keyDialog.open) keyDialog.showModal();
  find("key-value").focus();
  const earlier = decide;
  return new Promise((resolve) => {
    // two requests may both be refused: one key is for both
    decide = (isGiven) => (earlier?.(isGiven), resolve(isGiven));
  });
}

export function start(keyChanged) {
  find("open-settings").addEventListener("click", open);
  find("defaults").addEventListener("click", () => fill(DEFAULTS));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const number = (name) => (form.elements[name].value === "" ? null : Number(form.elements[name].value));
    save("settings", Object.fromEntries(Object.keys(DEFAULTS).map((name) => [name, number(name)])));
    dialog.close();
  });
  for (const shown of [dialog, keyDialog])
    shown.querySelector(".cancel").addEventListener("click", () => shown.close());
  find("change-key").addEventListener("click", async () => {
    if (await askKey("Servers that were started with a key ask for it. Leave the field empty to use none.")) {
      showKey();
      keyChanged();
    }
  });
  keyForm.addEventListener("submit", (event) => {
    event.preventDefault();
    save("key", find("key-value").value.trim());
    keyDialog.close("given");
  });
  keyDialog.addEventListener("close", () => {
    decide?.(keyDialog.returnValue === "given");
    decide = null;
  });
}
