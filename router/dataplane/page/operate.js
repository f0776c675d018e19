"use strict";
// What an operator may do from the page. The admin key is known in this block only: it is in no URL, no storage, no element.
{
  const TIMEOUT_MS = 5000;
  const SILENCE = "The router does not answer, so it may or may not have done it. Look at the figures before you try again.";

  // The text is for the operator.
  class Refused extends Error {}

  let key = null, state = null, busy = false;

  async function send(method, path, body, carried = key) {
    let answer, told;
    try {
      answer = await fetch(`${HERE}${path}`, {
        method,
        cache: "no-store",
        credentials: "omit", // else a wrong key would make the browser ask for a password
        headers: { authorization: `Bearer ${carried}`, "content-type": "application/json" },
        body: body && JSON.stringify(body),
        signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      told = await answer.json();
    } catch {
      throw new Refused(SILENCE);
    }
    if (answer.ok) return told;
    if (answer.status === 401 || answer.status === 403) {
      forget();
      throw new Refused("The router does not take this key: it is not the admin key.");
    }
    throw new Refused(told.error?.message || `The router refused: ${answer.status}.`);
  }

  // What holds now: what was drawn last may be older than what somebody has done since.
  async function refresh() {
    try {
      state = await ask("state", 0);
    } catch {
      throw new Refused(SILENCE);
    }
    draw();
  }

  // One at a time: what is asked for meanwhile is not done.
  async function act(work) {
    if (busy) return;
    setBusy(true);
    say("");
    try {
      const words = await work();
      await refresh();
      say(words);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      say("", error.message);
    } finally {
      setBusy(false);
    }
  }

  function setBusy(is) {
    busy = is;
    byId("operate").setAttribute("aria-busy", String(is));
  }

  function say(done, failed = "") {
    set("done", done);
    set("failed", failed);
  }

  // The key

  function forget() {
    key = null;
    draw();
    byId("key").focus();
  }

  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const given = byId("key").value.trim();
    byId("key").value = "";
    act(async () => {
      if (!/^[!-~]+$/.test(given)) throw new Refused("A key has no spaces, and no letters beyond ASCII.");
      await send("POST", "key", null, given);
      key = given;
      await refresh();
      byId("operate").focus(); // on no button: Enter pressed twice is to do nothing
      return "The key is good: servers can be drained, and the policy overridden.";
    });
  });

  byId("forget").addEventListener("click", () => {
    forget();
    say("The key is forgotten: the page reads only.");
  });

  // Drains

  const rows = new Map();

  function serverRow(name) {
    const line = document.createElement("p");
    const button = Object.assign(document.createElement("button"), { type: "button" });
    const words = document.createElement("span");
    button.addEventListener("click", () => drain(name));
    line.append(button, " ", words);
    byId("drains").append(line);
    return { button, words };
  }

  const serverOf = (name) => state.servers.find((server) => server.name === name);

  function standing({ drained, up, load }) {
    if (!drained) return up ? "gets requests" : "is down";
    if (load.sequences) return `gets nothing new; ${number(load.sequences)} in flight go on to their end`;
    return "gets nothing new, and has nothing left: it can be restarted";
  }

  function drain(name) {
    const wanted = !serverOf(name).drained; // as the button says
    return act(async () => {
      await refresh();
      const others = state.servers.filter((server) => server.name !== name && server.up && !server.drained);
      if (wanted && !others.length && !(await confirmed(`No other server takes requests. With ${name} drained, every request gets a 503 until a server is back.`))) return "";
      await send("POST", "drain", { server: name, drain: wanted });
      return wanted ? `${name} is drained: it gets nothing new.` : `${name} gets requests again.`;
    });
  }

  function confirmed(text) {
    const dialog = byId("confirm");
    set("confirm-text", text);
    dialog.returnValue = "";
    dialog.showModal();
    return new Promise((done) => {
      dialog.addEventListener("close", () => done(dialog.returnValue === "yes"), { once: true });
    });
  }

  byId("confirm-yes").addEventListener("click", () => byId("confirm").close("yes"));
  byId("confirm-no").addEventListener("click", () => byId("confirm").close());

  // The policy

  const hasThreshold = () => state.policy.usable.find((one) => one.name === byId("policy").value)?.has_threshold;

  byId("policy").addEventListener("change", () => draw());

  byId("override-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const asked = { policy: byId("policy").value, minutes: byId("minutes").valueAsNumber };
    const threshold = byId("threshold").valueAsNumber;
    if (hasThreshold() && !isNaN(threshold)) asked.threshold = threshold;
    act(async () => {
      const { override } = await send("POST", "policy", asked);
      return `Policy ${inWords(override)} is in force for ${duration(override.remaining_s)}.`;
    });
  });

  byId("undo").addEventListener("click", async () => {
    await act(async () => {
      await send("DELETE", "policy");
      return `Policy ${state.policy.configured} is in force again.`;
    });
    if (byId("undo").disabled) byId("policy").focus(); // else the focus were nowhere
  });

  function draw() {
    if (!state) return;
    byId("no-key").hidden = state.has_admin_key;
    byId("key-form").hidden = !state.has_admin_key || key !== null;
    byId("operate").hidden = key === null;
    for (const server of state.servers) {
      if (!rows.has(server.name)) rows.set(server.name, serverRow(server.name));
      const { button, words } = rows.get(server.name);
      button.textContent = `${server.drained ? "Undrain" : "Drain"} ${server.name}`;
      words.textContent = standing(server);
    }
    const select = byId("policy");
    const names = state.policy.usable.map((one) => one.name);
    if (names.join() !== [...select.options].map((option) => option.value).join()) select.replaceChildren(...names.map((name) => new Option(name)));
    byId("threshold").disabled = !hasThreshold();
    byId("undo").disabled = !state.policy.override;
    byId("undo").textContent = state.policy.override ? `Undo ${inWords(state.policy.override)}` : "Undo";
  }

  document.addEventListener("state", (event) => {
    // One that was asked for before the latest refresh says what no longer holds; a clock far behind is another router's.
    const behind = (state?.at_s ?? 0) - event.detail.at_s;
    if (behind > 0 && behind < TIMEOUT_MS / 1000) return;
    state = event.detail;
    draw();
  });
}
