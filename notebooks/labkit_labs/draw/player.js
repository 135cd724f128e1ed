async (packed) => {
  const host = document.currentScript.previousElementSibling
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt())
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))
  const film = await new Response(unpacked).json()
  const page = host.attachShadow({ mode: "open" })
  const last = film.says.length - 1
  const icon = (path) => `<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d="${path}"/></svg>`
  const button = (does, name, path) =>
    `<button data-do="${does}" aria-label="${name}" title="${name}">${icon(path)}</button>`
  const speeds = [0.5, 1, 2].map((x) => `<option value="${x}"${x == 1 ? " selected" : ""}>${x}×</option>`).join("")
  const drawn = film.marks.map(([mark]) => `<g class="mark">${mark}</g>`).join("")
  host.setAttribute("data-lm-suppress-shortcuts", "true") // JupyterLab's own keys
  page.innerHTML = `<style>
    :host { display: block; color: inherit; margin: 4px 0 }
    :host(:fullscreen) { background: Canvas; color: CanvasText; overflow: auto; padding: 2vh 2vw }
    .player { font: 15px/1.45 system-ui, sans-serif; container-type: inline-size }
    .player:focus-visible { outline: 2px solid #2f81f7; outline-offset: 3px }
    .scene { overflow-x: auto }
    .scene svg { display: block; width: 100%; max-height: 78vh }
    .says { display: grid; margin: 8px 0; font-size: 16px }
    .says span { grid-area: 1 / 1; visibility: hidden }
    .says .now { visibility: visible }
    .bar { display: flex; flex-wrap: wrap; gap: 6px; align-items: center }
    button, select { font: inherit; color: inherit; background: #8b949e26; border: 1px solid #8b949e99;
      border-radius: 6px; height: 32px; min-width: 38px; padding: 0 8px; cursor: pointer }
    button:hover, select:hover { background: #8b949e4d }
    option { color: CanvasText; background: Canvas }
    [data-do=play] { min-width: 92px; font-weight: 600; white-space: nowrap }
    .icon { width: 16px; height: 16px; fill: currentColor; vertical-align: -3px }
    input { flex: 1 1 60px; min-width: 60px; accent-color: #2f81f7 }
    @container (max-width: 560px) {
      [data-do=play] { min-width: 38px } [data-do=play] span { display: none }
      .scene svg { min-width: 620px; max-height: none }
      .scene text { font-size: 15px }
      .scene text[font-size="12"] { font-size: 14px }
      .scene text[font-size="11"], .scene .small text { font-size: 12.5px }
    }
  </style><div class="player" tabindex="0" role="group">
    <div class="scene">
      <svg viewBox="0 0 ${film.wide} ${film.tall}" role="img" font-family="system-ui,sans-serif" font-size="13"
        fill="currentColor">${film.base}${drawn}</svg>
    </div>
    <div class="says" aria-live="polite">${film.says.map((says) => `<span>${says}</span>`).join("")}</div>
    <div class="bar">
      ${button("back", "Step back", "M2 2h3v12H2zM14 2v12L6 8z")}
      ${button("play", "Play", "")}
      ${button("forward", "Step forward", "M11 2h3v12h-3zM2 2v12l8-6z")}
      <input type="range" min="0" max="${last}" aria-label="Frame"><output></output>
      <select aria-label="Speed" title="Speed">${speeds}</select>
      ${button("full", "Full screen", "M1 1h5v2H3v3H1zM10 1h5v5h-2V3h-3zM1 10h2v3h3v2H1zM13 10h2v5h-5v-2h3z")}
    </div>
  </div>`
  const one = (name) => page.querySelector(name)
  const player = one(".player"), slider = one("input"), play = one("[data-do=play]"), full = one("[data-do=full]")
  const marks = [...page.querySelectorAll(".mark")], says = [...page.querySelectorAll(".says span")]
  const calm = matchMedia("(prefers-reduced-motion: reduce)")
  let at = film.best, timer = 0, poster = true
  one("svg").setAttribute("aria-label", film.label)
  player.setAttribute("aria-label", film.label)
  full.hidden = !document.fullscreenEnabled

  const pause = () => film.seconds * 1000 / one("select").value
  const show = (to, moving) => {
    at = Math.min(last, Math.max(0, to))
    marks.forEach((mark, number) => {
      const seen = film.marks[number][1].some(([from, until]) => from <= at && at < until)
      const appears = seen && mark.style.display == "none"
      mark.style.display = seen ? "" : "none"
      if (!appears || !moving || calm.matches) return
      mark.querySelectorAll("[data-from]").forEach((each) => {
        const [x, y] = each.dataset.from.split(" ")
        const path = [{ transform: `translate(${x}px,${y}px)` }, { transform: "none" }]
        each.animate(path, { duration: pause() * 0.6, easing: "ease-in-out" })
      })
    })
    says.forEach((each, number) => each.classList.toggle("now", number == at))
    slider.value = at
    slider.setAttribute("aria-valuetext", says[at].textContent)
    one("output").textContent = `${at + 1}/${last + 1}`
  }
  const label = () => {
    const [path, name] = timer ? ["M3 2h4v12H3zM9 2h4v12H9z", "Pause"] : ["M3 1v14l11-7z", "Play"]
    play.innerHTML = `${icon(path)}<span> ${name}</span>`
    play.setAttribute("aria-label", name)
    play.title = name
  }
  const stop = () => { clearTimeout(timer); timer = 0; label() }
  const next = () => {
    timer = setTimeout(() => {
      show(at + 1, true)
      if (at < last && host.isConnected) next()
      else stop()
    }, pause())
  }
  const start = () => {
    if (poster || at == last) show(0, true)
    poster = false
    next()
    label()
  }
  const go = (to, moving) => { stop(); poster = false; show(to, moving) }
  const does = {
    back: () => go(at - 1),
    forward: () => go(at + 1, true),
    play: () => (timer ? stop() : start()),
    full: () => (document.fullscreenElement ? document.exitFullscreen() : host.requestFullscreen().catch(() => {})),
  }
  page.addEventListener("click", (event) => does[event.target.closest("button")?.dataset.do]?.())
  slider.addEventListener("input", () => go(+slider.value))
  player.addEventListener("keydown", (event) => {
    const key = { " ": "play", ArrowLeft: "back", ArrowRight: "forward" }[event.key]
    const own = event.target.matches("select") || (event.key == " " && event.target.matches("button"))
    if (!key || own || event.ctrlKey || event.altKey || event.metaKey) return
    event.preventDefault()
    does[key]()
  })
  show(at)
  label()
}
