"use strict";
// One clock drives all videos in view: they are started together, kept together, and wrapped together.
(() => {
  const clips = JSON.parse(document.getElementById("clips").textContent);
  const { frames, fps, perPage, videos } = clips;
  const length = frames / fps;
  const $ = (id) => document.getElementById(id);
  const articles = [...document.querySelectorAll(".prompt")];
  const pages = Math.max(1, Math.ceil(articles.length / perPage));
  const still = window.matchMedia("(prefers-reduced-motion: reduce)");
  const state = { playing: false, at: 0, speed: 1, page: 0, since: 0 };
  let seed = document.querySelector("input[name=seed]:checked")?.value ?? document.querySelector(".row")?.dataset.seed;
  let shown = [];
  let coming = 0; // the frame that is asked for; one at a time, however often playing stops and starts

  const source = (name) => {
    const bytes = Uint8Array.from(atob(videos[name]), (c) => c.charCodeAt(0));
    return URL.createObjectURL(new Blob([bytes], { type: "video/mp4" }));
  };
  const now = () => (state.playing ? state.at + ((performance.now() - state.since) / 1000) * state.speed : state.at);
  // The middle of a frame, so that rounding never shows its neighbour.
  const middle = (time) => Math.min(frames - 1, Math.floor(time * fps + 1e-6)) / fps + 0.5 / fps;

  function draw(time) {
    const frame = Math.min(frames - 1, Math.floor(time * fps + 1e-6));
    $("seek").value = frame;
    $("seek").setAttribute("aria-valuetext", `frame ${frame + 1} of ${frames}`);
    $("frame").textContent = `${frame + 1} / ${frames}`;
    $("play").classList.toggle("playing", state.playing);
    $("play").setAttribute("aria-label", state.playing ? "Pause" : "Play");
  }
  function settle(time) {
    for (const video of shown) video.currentTime = middle(time);
  }
  function start() {
    if (state.at >= length - 0.5 / fps) state.at = 0;
    state.playing = true;
    state.since = performance.now();
    for (const video of shown) {
      video.playbackRate = state.speed;
      video.currentTime = state.at;
      video.play().catch(() => {});
    }
    coming = requestAnimationFrame(tick);
  }
  function stop(time = now()) {
    state.at = Math.max(0, Math.min(time, length));
    state.playing = false;
    cancelAnimationFrame(coming);
    for (const video of shown) video.pause();
    settle(state.at);
    draw(state.at);
  }
  function tick() {
    if (!state.playing) return;
    let time = now();
    if (time >= length) {
      if (!$("loop").checked) return stop((frames - 1) / fps);
      state.at = 0;
      state.since = performance.now();
      time = 0;
      for (const video of shown) {
        video.currentTime = 0;
        video.play().catch(() => {});
      }
    }
    for (const video of shown) {
      if (!video.seeking && !video.ended && Math.abs(video.currentTime - time) > 0.12) video.currentTime = time;
    }
    draw(time);
    coming = requestAnimationFrame(tick);
  }
  function seek(frame) {
    stop(Math.max(0, Math.min(frames - 1, frame)) / fps);
  }

  function show() {
    const first = state.page * perPage;
    const playing = state.playing;
    const time = now();
    if (playing) stop(time);
    articles.forEach((article, i) => (article.hidden = i < first || i >= first + perPage));
    shown = [];
    for (const article of articles.slice(first, first + perPage)) {
      for (const row of article.querySelectorAll(".row")) {
        row.hidden = row.dataset.seed !== seed;
        if (!row.hidden) shown.push(...row.querySelectorAll("video"));
      }
    }
    for (const video of shown) {
      if (video.src) continue;
      video.addEventListener("error", () => ($("unplayable").hidden = false), { once: true });
      video.src = source(video.dataset.clip);
    }
    $("previous").disabled = state.page === 0;
    $("next").disabled = state.page === pages - 1;
    $("range").textContent = `Prompts ${first + 1}–${Math.min(first + perPage, articles.length)} of ${articles.length}`;
    if (playing) start();
    else stop(time);
  }

  $("play").addEventListener("click", () => (state.playing ? stop() : start()));
  $("seek").addEventListener("input", () => seek(Number($("seek").value)));
  $("back").addEventListener("click", () => seek(Math.floor(now() * fps + 1e-6) - 1));
  $("forth").addEventListener("click", () => seek(Math.floor(now() * fps + 1e-6) + 1));
  $("previous").addEventListener("click", () => { state.page -= 1; show(); });
  $("next").addEventListener("click", () => { state.page += 1; show(); });
  for (const input of document.querySelectorAll("input[name=speed]")) {
    input.addEventListener("change", () => {
      const playing = state.playing;
      if (playing) stop();
      state.speed = Number(input.value);
      if (playing) start();
    });
  }
  for (const input of document.querySelectorAll("input[name=seed]")) {
    input.addEventListener("change", () => { seed = input.value; show(); });
  }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden && state.playing) stop();
  });

  if (!articles.length) return;
  show();
  // Starts by itself the first time that the videos come into view, unless the reader asked for stillness.
  if (!still.matches && "IntersectionObserver" in window) {
    const watch = new IntersectionObserver((entries) => {
      if (entries.some((entry) => entry.isIntersecting)) {
        watch.disconnect();
        if (!state.playing) start();
      }
    });
    watch.observe($("prompts"));
  }
})();
