// The conversation: questions, answers as they are written, and what can be done with each.

import { complete, remember, RequestError, search } from "./api.js";
import { announce, clear, notice } from "./notice.js";
import { load, save } from "./session.js";
import { askKey, settings } from "./settings.js";
import { sourcesText, stateText, textToCopy, TurnView } from "./turn.js";
import { count } from "./text.js";

const SPEAK_EVERY = 3000; // milliseconds between the sentences that a screen reader is given
const find = (id) => document.getElementById(id);
const [place, question, send, lookUp, jump] = ["conversation", "question", "send", "look-up", "jump"].map(find);

let views = [];
let writing = null; // the AbortController of the answer that is being written
let hooks = null; // { place() -> {model, where, name}, lost(), remembered() }

const turns = () => views.map((view) => view.turn);

function keep() {
  if (!save("conversation", turns())) notice("This conversation is too long to be kept when the page is loaded again.");
}

function show(list) {
  views = list.map((turn) => new TurnView(turn, actions));
  place.replaceChildren(...views.map((view) => view.element));
  find("empty").hidden = views.length > 0;
}

const isAtEnd = () => document.documentElement.scrollHeight - scrollY - innerHeight < 120;
const toEnd = () => scrollTo({ top: document.documentElement.scrollHeight });

function setWriting(controller) {
  writing = controller;
  const label = controller ? "Stop" : "Send";
  send.querySelector("use").setAttribute("href", controller ? "#icon-stop" : "#icon-send");
  send.querySelector("span").textContent = label;
  find("keys").textContent = controller ? "Escape stops the answer" : "Shift+Enter for a new line";
  place.setAttribute("aria-busy", String(controller !== null));
  for (const button of [lookUp, ...place.querySelectorAll(".again, .retry")]) button.disabled = controller !== null;
}

// The conversation as the model reads it: questions without an answer are left out.
function messages(last) {
  const answered = turns().filter((turn) => turn !== last && !turn.isSearch && turn.answer.trim());
  const before = answered.flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.answer },
  ]);
  return [...before, { role: "user", content: last.question }];
}

const whereFields = (where) =>
  where === "memory" ? { memory: true } : where ? { knowledge_base: where.slice(3) } : {};

function completionBody(turn) {
  const { temperature, max_tokens, top_k, seed } = settings();
  const body = { model: hooks.place().model, messages: messages(turn), temperature, ...whereFields(turn.where) };
  if (turn.where) body.top_k = top_k;
  if (max_tokens !== null) body.max_tokens = max_tokens;
  if (seed !== null) body.seed = seed;
  return body;
}

// Gives a screen reader whole sentences from time to time, and the rest at the end: never single tokens.
class Speaker {
  constructor(turn) {
    this.turn = turn;
    this.said = 0;
    this.timer = setInterval(() => this.say(), SPEAK_EVERY);
  }

  say() {
    const text = this.turn.answer.slice(this.said);
    const [sentences] = text.match(/^[^]*[.!?:\n](?=\s)/) ?? [""];
    announce(sentences);
    this.said += sentences.length;
  }

  end() {
    clearInterval(this.timer);
    const { turn } = this;
    const sources = turn.sources?.length && !turn.isSearch ? sourcesText(turn.sources) : "";
    const found = turn.isSearch && turn.sources ? `${count(turn.sources.length, "passage", "passages")} found` : "";
    announce([turn.answer.slice(this.said), stateText(turn), sources, found].filter(Boolean).join(" "));
  }
}

async function readAnswer(view, signal) {
  const { turn } = view;
  for await (const chunk of complete(completionBody(turn), signal)) {
    const choice = chunk.choices?.[0];
    if (choice?.delta?.content) {
      const follow = isAtEnd();
      turn.answer += choice.delta.content;
      view.soon();
      if (follow) requestAnimationFrame(toEnd);
    }
    if (choice?.finish_reason) turn.finish = choice.finish_reason;
    if (chunk.sources) turn.sources = chunk.sources;
  }
  turn.state = "done";
}

async function readPassages(view, signal) {
  const { turn } = view;
  const body = { query: turn.question, top_k: settings().top_k, ...whereFields(turn.where) };
  const { data } = await search(body, signal);
  turn.sources = data.map((source, i) => ({ number: i + 1, ...source }));
  turn.state = "found";
}

// Fill a turn, from its beginning. Its state tells how that ended.
async function write(view) {
  const { turn } = view;
  const controller = new AbortController();
  Object.assign(turn, { answer: "", sources: null, finish: null, error: null, state: "writing" });
  setWriting(controller);
  view.update();
  keep();
  const speaker = new Speaker(turn);
  try {
    await (turn.isSearch ? readPassages : readAnswer)(view, controller.signal);
  } catch (error) {
    if (error.name === "AbortError") {
      turn.state = "stopped";
    } else {
      const { kind, message } =
        error instanceof RequestError
          ? error
          : { kind: "failed", message: `The answer could not be read: ${error.message}` };
      Object.assign(turn, { state: "failed", error: { kind, message } });
    }
  }
  if (writing === controller) setWriting(null);
  speaker.end();
  const follow = isAtEnd();
  view.update();
  if (follow) toEnd();
  if (!views.includes(view)) return; // a new chat has begun
  keep();
  if (turn.error) await recover(view);
}

async function recover(view) {
  const { kind, message } = view.turn.error;
  if (kind === "away" || kind === "broken") hooks.lost();
  if (kind === "key" && (await askKey(message))) await write(view);
}

const actions = {
  async copy(view) {
    const label = view.part(".copy span");
    try {
      await navigator.clipboard.writeText(textToCopy(view.turn));
      label.textContent = "Copied";
      announce("Copied");
      setTimeout(() => (label.textContent = "Copy"), 2000);
    } catch {
      // without https, or without permission, browsers keep the clipboard from a page
      getSelection().selectAllChildren(view.part(".text"));
      notice("The answer is selected: copy it with Ctrl+C.");
    }
  },
  async remember(view) {
    try {
      await remember(view.turn.answer, `chat: ${view.turn.question}`.slice(0, 200));
      notice("The answer is in the memory.");
      hooks.remembered();
    } catch (error) {
      if (!(error instanceof RequestError)) throw error;
      if (error.kind === "key" && (await askKey(error.message))) await actions.remember(view);
      else notice(error.message, { isError: true });
    }
  },
  again(view) {
    question.focus();
    return write(view);
  },
  retry(view) {
    question.focus();
    return write(view);
  },
};

function ask(isSearch) {
  const text = question.value.trim();
  if (!text || writing) {
    announce(writing ? "The answer is still being written. Escape stops it." : "");
    return;
  }
  const { where, name } = hooks.place();
  const doing = where ? `Searching ${name}` : "Thinking";
  const turn = { id: Date.now(), question: text, answer: "", state: "writing", sources: null, where, doing, isSearch };
  question.value = "";
  resize();
  clear();
  const view = new TurnView(turn, actions);
  views.push(view);
  place.append(view.element);
  find("empty").hidden = true;
  toEnd();
  write(view);
}

function newChat() {
  const old = turns();
  writing?.abort();
  setWriting(null);
  show([]);
  keep();
  question.focus();
  if (old.length)
    notice("This is a new chat.", { label: "Undo", act: () => (show(old), keep(), toEnd(), question.focus()) });
}

// The field is as high as its text, up to a third of the window.
function resize() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, innerHeight / 3)}px`;
}

// Show the conversation of this tab, and listen.
export function start(given) {
  hooks = given;
  // an answer that was being written when the page was left can't go on
  show(load("conversation", []).map((turn) => (turn.state === "writing" ? { ...turn, state: "stopped" } : turn)));
  question.value = load("draft", "");
  setWriting(null);
  resize();
  question.addEventListener("input", resize);
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    ask(false);
  });
  find("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (writing) writing.abort();
    else ask(false);
  });
  lookUp.addEventListener("click", () => ask(true));
  find("new-chat").addEventListener("click", newChat);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !document.querySelector("dialog:modal")) writing?.abort();
  });
  jump.addEventListener("click", () => (toEnd(), question.focus()));
  new IntersectionObserver(([end]) => (jump.hidden = end.isIntersecting)).observe(find("end"));
  addEventListener("pagehide", () => {
    keep();
    save("draft", question.value);
  });
  if (views.length) toEnd();
}
