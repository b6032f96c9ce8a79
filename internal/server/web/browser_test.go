package web_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp/kb"

	"forgeci/internal/ci"
	"forgeci/internal/protocol"
	"forgeci/internal/server/web/storybook"
	"forgeci/internal/testkit"
)

// serve starts a server of the book in which every request is signed in.
func serve(t *testing.T, book *storybook.Book) *httptest.Server {
	t.Helper()
	h := book.Handler(logger(t), "0.1.0")
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.AddCookie(&http.Cookie{Name: "forgeci", Value: "sample-session"})
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

// clean fails the test for everything that went wrong on the page.
func clean(t *testing.T, tab *testkit.Tab) {
	t.Helper()
	for _, p := range tab.Problems() {
		t.Error(p)
	}
}

// TestBrowser holds what only a browser shows. Its parts share one browser.
func TestBrowser(t *testing.T) { //nolint:tparallel // its parts share one browser
	t.Parallel()
	b := testkit.StartBrowser(t)
	for _, part := range []struct {
		name string
		test func(*testing.T, *testkit.Browser)
	}{
		{"Accessibility", accessibility},
		{"Case_UI_02_HostileTextRunsNothing", hostileText},
		{"Case_LOG_11_TableInTheBrowser", terminalTable},
		{"SignIn", signIn},
		{"Keyboard", keyboard},
		{"WithoutScript", withoutScript},
		{"Case_UI_01_MillionLines", millionLines},
		{"Case_UI_01_LiveLines", liveLines},
		{"LiveLogEndsAsTheServerSaysIt", liveLogSeals},
		{"Case_UI_04_PageFollows", pageFollows},
		{"Case_UI_04_ManyPages", manyPages},
		{"NarrowPagesDoNotScrollSideways", narrow},
	} {
		t.Run(part.name, func(t *testing.T) { part.test(t, b) })
	}
}

// accessibility checks every page with axe-core in the light theme, and in the
// dark theme the pages that between them use every colour.
func accessibility(t *testing.T, b *testkit.Browser) {
	dark := []string{"overview", "run-failed", "run-warnings", "run-cancelling", "no-page", "run-running", "job-failed", "job-colours", "runners", "deadletters", "signin"}
	for _, p := range storybook.Pages() {
		if p.Name == "run-large" {
			continue
		}
		t.Run(p.Name, func(t *testing.T) {
			s := serve(t, storybook.New(p.Data(), storybook.Now))
			tab := b.Tab(t)
			tab.Open(s.URL + p.Path)
			tab.Wait(15*time.Second, `document.readyState === "complete" && (!document.querySelector("#lines") || document.querySelector("#lines[data-ready]") || location.search)`)
			for _, theme := range []string{"light", "dark"} {
				if theme == "dark" && !slices.Contains(dark, p.Name) {
					continue
				}
				tab.Prefer("prefers-color-scheme", theme)
				for _, v := range tab.Axe() {
					t.Errorf("%s: %s", theme, v)
				}
			}
		})
	}
}

func hostileText(t *testing.T, b *testkit.Browser) {
	s := serve(t, storybook.New(hostile(), storybook.Now))
	tab := b.Tab(t)
	for _, p := range storybook.Pages() {
		if p.Name == "run-large" || strings.HasSuffix(p.Name, "-none") || strings.HasSuffix(p.Name, "-empty") {
			continue
		}
		tab.Open(s.URL + p.Path)
		tab.Wait(15*time.Second, `document.readyState === "complete" && (!document.querySelector("#lines") || document.querySelector("#lines[data-ready]") || location.search)`)
		for _, x := range tab.Problems() {
			t.Errorf("%s: %s", p.Name, x)
		}
		if p.Name == "job-failed" {
			text := testkit.Eval[string](tab, `document.querySelector("#rows").textContent`)
			if !strings.Contains(text, `<script>x()</script><img src=x onerror=x()>`) {
				t.Errorf("the log does not show the payload as text: %.300q", text)
			}
			if n := testkit.Eval[int](tab, `document.querySelectorAll("#rows a:not(.n)").length`); n != 0 {
				t.Errorf("%d links to scripts", n)
			}
		}
	}
	// A fragment that replaces the page's main part runs nothing either.
	tab.Open(s.URL + "/")
	testkit.Eval[bool](tab, `(async () => { const m = await import(document.querySelector("script[type=module]").src); await m.refresh(); return true; })()`)
	clean(t, tab)
}

func terminalTable(t *testing.T, b *testkit.Browser) {
	table, err := os.ReadFile("ansi/testdata/cases.json")
	if err != nil {
		t.Fatal(err)
	}
	s := serve(t, storybook.New(storybook.Sample(), storybook.Now))
	tab := b.Tab(t)
	tab.Open(s.URL + "/")
	wrong := testkit.Eval[[]string](tab, `(async () => {
		const {Renderer} = await import(new URL("ansi.js", document.querySelector("script[type=module]").src));
		const wrong = [], plain = lines => JSON.stringify(lines.map(l => [l.s.map(s => [s.c || "", s.h || "", s.t]), l.cut || 0]));
		let done = 0;
		for (const c of `+string(table)+`) {
			for (let at = 0; at <= Math.min(c.input.length, 200); at++) {
				if (at && c.input.charCodeAt(at - 1) >> 10 === 54) continue; // inside a surrogate pair
				const r = new Renderer(), lines = [...r.feed(c.input.slice(0, at)), ...r.feed(c.input.slice(at))], last = r.pending();
				if (last.s.length || last.cut) lines.push(last);
				if (plain(lines) !== plain(c.lines)) { wrong.push(c.name + " cut at " + at + ": " + plain(lines).slice(0, 300)); break; }
			}
			const r = new Renderer(), parts = c.input.split("\n").map(p => r.line(p));
			if (plain(parts.slice(0, c.lines.length)) !== plain(c.lines)) wrong.push(c.name + " by lines: " + plain(parts).slice(0, 300));
			done++;
		}
		if (done < 70) wrong.push("only " + done + " cases");
		return wrong;
	})()`)
	for _, w := range wrong {
		t.Error(w)
	}
}

// signIn goes through the page over plain HTTP on 127.0.0.1, where a browser
// need not take Secure cookies.
func signIn(t *testing.T, b *testkit.Browser) {
	s := httptest.NewServer(storybook.New(storybook.Sample(), storybook.Now).Handler(logger(t), ""))
	defer s.Close()
	defer s.CloseClientConnections()
	tab := b.Tab(t)
	tab.Open(s.URL + "/runs?status=failed")
	if at := testkit.Eval[string](tab, "location.pathname"); at != "/signin" {
		t.Fatalf("without a session the browser is at %s", at)
	}
	tab.Wait(15*time.Second, `document.activeElement.id === "token"`)
	tab.Press("wrong\r")
	tab.Wait(15*time.Second, `document.querySelector("[role=alert]")`)
	tab.Wait(15*time.Second, `document.readyState === "complete" && document.activeElement.id === "token"`)
	tab.Press(storybook.Token + "\r")
	tab.Wait(15*time.Second, `location.pathname + location.search === "/runs?status=failed"`)
	if c := testkit.Eval[string](tab, "document.cookie"); c != "" {
		t.Errorf("scripts can read the cookie %q", c)
	}
	tab.Click("form[action='/signout'] button")
	tab.Wait(15*time.Second, `location.pathname === "/signin"`)
}

func keyboard(t *testing.T, b *testkit.Browser) {
	s := serve(t, storybook.New(storybook.Sample(), storybook.Now))
	tab := b.Tab(t)
	focus := func() string {
		return testkit.Eval[string](tab, `(e => e.id || e.className || e.textContent.trim())(document.activeElement)`)
	}
	tab.Open(s.URL + "/runs/" + string(storybook.RunningRun))
	tab.Press("\t")
	if got := focus(); got != "skip" {
		t.Errorf("the first tab stop is %q, want the link to the content", got)
	}
	if !testkit.Eval[bool](tab, `document.activeElement.getBoundingClientRect().left >= 0`) {
		t.Error("the link to the content is not seen when it has the focus")
	}
	tab.Press("\r")
	tab.Wait(15*time.Second, `document.activeElement.id === "main"`)
	// Every job can be reached and opened; the drawing is not in the way.
	var stops []string
	for range 60 {
		tab.Press("\t")
		stops = append(stops, testkit.Eval[string](tab, `document.activeElement.getAttribute("href") || document.activeElement.localName`))
		if !testkit.Eval[bool](tab, `(e => e === document.body || getComputedStyle(e).outlineStyle !== "none")(document.activeElement)`) {
			t.Errorf("%s does not show that it has the focus", stops[len(stops)-1])
		}
	}
	for _, want := range []string{"/jobs/" + string(storybook.LiveJob), "/jobs/" + string(storybook.ColourJob), "summary", "button"} {
		if !slices.Contains(stops, want) {
			t.Errorf("%s is not reached by tab; stops: %q", want, stops)
		}
	}
	// The log scrolls by keys.
	tab.Open(s.URL + "/jobs/" + string(storybook.FailedJob))
	tab.Wait(15*time.Second, `document.querySelector("#lines[data-ready]")`)
	testkit.Eval[bool](tab, `document.querySelector("#lines").focus(), true`)
	before := testkit.Eval[float64](tab, `document.querySelector("#lines").scrollTop`)
	tab.Press(kb.PageUp)
	tab.Wait(15*time.Second, fmt.Sprintf(`document.querySelector("#lines").scrollTop < %v`, before-100))
	// The search goes to a match, Enter to the next.
	tab.Click("#q")
	tab.Press("price_test 01\r")
	tab.Wait(15*time.Second, `document.querySelector(".hit") && document.querySelector("#matches").textContent.includes("of 10")`)
	clean(t, tab)
}

func withoutScript(t *testing.T, b *testkit.Browser) {
	s := serve(t, storybook.New(storybook.Sample(), storybook.Now))
	tab := b.Tab(t)
	tab.Script(false)
	tab.Open(s.URL + "/jobs/" + string(storybook.LongJob))
	lines := func() (first, last string) {
		tab.Wait(15*time.Second, `document.readyState === "complete" && document.querySelector("#rows .n")`)
		return testkit.Eval[string](tab, `document.querySelector("#rows .n").textContent`),
			testkit.Eval[string](tab, `[...document.querySelectorAll("#rows .n")].at(-1).textContent`)
	}
	if first, last := lines(); first != "999801" || last != "1000000" {
		t.Errorf("the page shows lines %s to %s, want the last 200", first, last)
	}
	tab.Click("#logpages a[rel=prev]")
	tab.Wait(15*time.Second, `location.search.includes("from=999601")`)
	if first, last := lines(); first != "999601" || last != "999800" {
		t.Errorf("the page before shows lines %s to %s", first, last)
	}
	tab.Click("#rows .ln:nth-child(3) .n")
	tab.Wait(15*time.Second, `document.querySelector(".ln:target .n")?.textContent === "999603"`)
	tab.Open(s.URL + "/jobs/" + string(storybook.FailedJob) + "?q=rounds")
	if n := testkit.Eval[int](tab, `document.querySelectorAll("#rows .ln").length`); n != 1 {
		t.Errorf("the search shows %d lines, want 1", n)
	}
	tab.Open(s.URL + "/runs/" + string(storybook.RunningRun))
	tab.Click("form[action$='/cancel'] button")
	tab.Wait(15*time.Second, `location.pathname.startsWith("/runs/")`)
}

func millionLines(t *testing.T, b *testkit.Browser) {
	s := serve(t, storybook.New(storybook.Sample(), storybook.Now))
	tab := b.Tab(t)
	// open says how long it takes until lines are seen: the best of three on a
	// machine that does nothing else.
	open := func(hash string) time.Duration {
		best := time.Hour
		slow := time.Duration(10 * slowdown(tab))
		for range 3 {
			start := time.Now()
			tab.Open(s.URL + "/jobs/" + string(storybook.LongJob) + "?" + fmt.Sprint(start.UnixNano()) + hash)
			tab.Wait(20*time.Second, `document.querySelector("#lines[data-ready] .ln:not(.loading)")`)
			if best = min(best, time.Since(start)); best < time.Second {
				break
			}
		}
		return best * 10 / slow
	}
	// visible is an expression that lists the numbers of the lines in the window.
	const visible = `((b, rows) => rows.filter(r => r.getBoundingClientRect().bottom > b.top + 2 && r.getBoundingClientRect().top < b.bottom - 2).map(r => +r.firstChild.textContent))` +
		`(document.querySelector("#lines").getBoundingClientRect(), [...document.querySelectorAll("#rows .ln:not(.loading)")])`
	see := func(line int, why string) {
		t.Helper()
		start := time.Now()
		for !slices.Contains(testkit.Eval[[]int](tab, visible), line) {
			if time.Since(start) > 10*time.Second {
				t.Fatalf("%s: line %d is not among %v", why, line, testkit.Eval[[]int](tab, visible))
			}
		}
	}
	if took := open(""); took > 2*time.Second {
		t.Errorf("the first lines are seen after %v, want under 2 s", took)
	}
	testkit.Eval[bool](tab, `window.tasks = [], new PerformanceObserver(l => window.tasks.push(...l.getEntries().map(e => e.duration))).observe({type: "longtask"}), true`)
	see(1_000_000, "a finished log opens at its end")
	mounted := 0
	for i := range 40 {
		testkit.Eval[bool](tab, fmt.Sprintf(`document.querySelector("#lines").scrollTop = %d, true`, (i*1_237_000)%6_000_000))
		mounted = max(mounted, testkit.Eval[int](tab, `document.querySelectorAll(".ln").length`))
	}
	testkit.Eval[bool](tab, `document.querySelector("#lines").scrollTop = 3000000, new Promise(r => setTimeout(() => r(true), 400))`)
	tab.Wait(10*time.Second, visible+`.length > 10`)
	for range 30 { // small steps move by single lines however long the log is
		steps := testkit.Eval[[]int](tab, `(async () => {
			const first = () => Math.min(...[...document.querySelectorAll("#rows .ln")].filter(r => r.getBoundingClientRect().bottom > document.querySelector("#lines").getBoundingClientRect().top + 2).map(r => +r.firstChild.textContent));
			const before = first();
			document.querySelector("#lines").scrollBy(0, 40);
			await new Promise(r => requestAnimationFrame(() => requestAnimationFrame(r)));
			return [before, first()];
		})()`)
		if moved := steps[1] - steps[0]; moved < 0 || moved > 3 {
			t.Fatalf("a step of two lines went from line %d to %d", steps[0], steps[1])
		}
		mounted = max(mounted, testkit.Eval[int](tab, `document.querySelectorAll(".ln").length`))
	}
	if mounted > 2000 {
		t.Errorf("%d lines in the page at once, want at most 2000", mounted)
	}
	testkit.Eval[bool](tab, `document.querySelector("#lines").scrollTop = 0, true`)
	see(1, "scrolled to the start")
	if heap := testkit.Eval[float64](tab, `performance.memory.usedJSHeapSize`); heap > 300e6 {
		t.Errorf("heap of %.0f MB, want under 300", heap/1e6)
	}
	smooth(t, tab)
	if took := open("#L987654"); took > 2*time.Second {
		t.Errorf("a deep link is seen after %v, want under 2 s", took)
	}
	see(987_654, "deep link")
	tab.Wait(15*time.Second, `document.querySelector(".ln.on .n").textContent === "987654"`)
	tab.Click("#q")
	tab.Press("needle\r")
	tab.Wait(20*time.Second, `document.querySelector(".ln.hit:not(.loading)")`)
	if text := testkit.Eval[string](tab, `document.querySelector(".ln.hit .t").textContent`); !strings.Contains(text, "needle") {
		t.Errorf("the match shows %q", text)
	}
	if m := testkit.Eval[string](tab, `document.querySelector("#matches").textContent`); !strings.Contains(m, "of 10") {
		t.Errorf("the search found %q, want 10 matches of the whole log", m)
	}
	tab.Click("#step-1 .title")
	see(10_001, "the second step begins")
	clean(t, tab)
}

// slowdown says how many times slower than alone a page runs now, beside what
// else the machine does: the mean of many short loops against the fastest.
func slowdown(tab *testkit.Tab) float64 {
	return max(1, testkit.Eval[float64](tab, `(async () => {
		const took = [];
		for (let i = 0; i < 150; i++) {
			const start = performance.now();
			for (let j = 0, x = 0; j < 1e6; j++) x += j % 7;
			took.push(performance.now() - start);
			if (i % 10 === 9) await new Promise(r => setTimeout(r));
		}
		return took.reduce((a, b) => a + b) / took.length / Math.max(Math.min(...took), 0.1);
	})()`))
}

// smooth fails the test when the 95th percentile of the main thread's tasks is
// over 200 ms of a machine that does nothing else. The browser reports those
// over 50 ms; each of the scrolls and bursts before this (60 at least) was a
// task as well, and counts as short when it was not reported.
func smooth(t *testing.T, tab *testkit.Tab) {
	t.Helper()
	tasks := testkit.Eval[[]float64](tab, `window.tasks`)
	for len(tasks) < 60 {
		tasks = append(tasks, 0)
	}
	slices.Sort(tasks)
	if at, slow := tasks[len(tasks)*95/100], slowdown(tab); at > 200*slow {
		t.Errorf("95th percentile of tasks is %.0f ms with a machine %.1f times slower than alone, want under 200: %.0f", at, slow, tasks)
	}
}

func liveLines(t *testing.T, b *testkit.Browser) {
	d := storybook.Sample()
	log := d.Logs[storybook.LiveJob]
	book := storybook.New(d, storybook.Now)
	s := serve(t, book)
	tab := b.Tab(t)
	tab.Open(s.URL + "/jobs/" + string(storybook.LiveJob))
	tab.Wait(15*time.Second, `document.querySelector("#lines[data-ready]")`)
	tab.Wait(15*time.Second, `[...document.querySelectorAll(".ln .t")].at(-1).textContent.includes("linking  30%")`)
	log.Append(1, protocol.Stdout, "\rlinking 100%\n", 0)
	tab.Wait(15*time.Second, `[...document.querySelectorAll(".ln .t")].some(t => t.textContent === "linking 100%")`)
	// A character split over two events, a gap, and another stream in between.
	log.Append(1, protocol.Stdout, "price in \xe2\x82", 0)
	log.Append(1, protocol.Stderr, "aside\n", 0)
	log.Append(1, protocol.Stdout, "\xac\n", 0)
	log.Append(1, protocol.Stdout, "after the gap\n", 77)
	tab.Wait(15*time.Second, `[...document.querySelectorAll(".ln .t")].some(t => t.textContent === "price in €")`)
	tab.Wait(15*time.Second, `[...document.querySelectorAll(".ln .t")].some(t => t.textContent === "77 bytes lostafter the gap")`)
	testkit.Eval[bool](tab, `window.tasks = [], new PerformanceObserver(l => window.tasks.push(...l.getEntries().map(e => e.duration))).observe({type: "longtask"}), true`)
	const perTick, ticks = 250, 60 // 5,000 lines a second for three seconds
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	n := 0
	for range ticks {
		var text strings.Builder
		for range perTick {
			fmt.Fprintf(&text, "\x1b[32mline\x1b[0m %d of many, with some text behind it\n", n)
			n++
		}
		log.Append(1, protocol.Stdout, text.String(), 0)
		<-tick.C
	}
	tab.Wait(15*time.Second, fmt.Sprintf(`[...document.querySelectorAll(".ln .t")].some(t => t.textContent.startsWith("line %d of"))`, n-1))
	if mounted := testkit.Eval[int](tab, `document.querySelectorAll(".ln").length`); mounted > 2000 {
		t.Errorf("%d lines in the page, want at most 2000", mounted)
	}
	smooth(t, tab)
	// Scrolling up stops following; the button starts it again.
	testkit.Eval[bool](tab, `document.querySelector("#lines").scrollTop -= 2000, true`)
	tab.Wait(15*time.Second, `document.querySelector("#follow").textContent === "Follow"`)
	at := testkit.Eval[float64](tab, `document.querySelector("#lines").scrollTop`)
	log.Append(1, protocol.Stdout, "one more\n", 0)
	tab.Wait(15*time.Second, fmt.Sprintf(`document.querySelector("#lines").scrollTop === %v`, at))
	tab.Click("#follow")
	tab.Wait(15*time.Second, `[...document.querySelectorAll(".ln .t")].some(t => t.textContent === "one more")`)
	if log.Readers() != 1 || book.Watching() != 0 {
		t.Errorf("the page holds %d log streams and %d others, want one in all", log.Readers(), book.Watching())
	}
	clean(t, tab)
	start := time.Now()
	tab.Open("about:blank")
	for log.Readers() > 0 && time.Since(start) < 6*time.Second {
		time.Sleep(50 * time.Millisecond)
	}
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("the server's stream ended %v after the page, want under 5 s", took)
	}
}

func liveLogSeals(t *testing.T, b *testkit.Browser) {
	d := storybook.Sample()
	log := d.Logs[storybook.LiveJob]
	book := storybook.New(d, storybook.Now)
	s := serve(t, book)
	tab := b.Tab(t)
	tab.Open(s.URL + "/jobs/" + string(storybook.LiveJob))
	tab.Wait(15*time.Second, `document.querySelector("#lines[data-ready]")`)
	s.CloseClientConnections() // a dropped connection is not the end
	log.Append(1, protocol.Stdout, "\nback again\n", 0)
	tab.Wait(15*time.Second, `[...document.querySelectorAll(".ln .t")].some(t => t.textContent === "back again")`)
	if n := testkit.Eval[int](tab, `[...document.querySelectorAll(".ln .t")].filter(t => t.textContent.includes("module_120")).length`); n != 1 {
		t.Errorf("after the connection was lost a line is there %d times", n)
	}
	book.Edit(func(d *storybook.Data) {
		j := d.Jobs[storybook.LiveJob]
		end := storybook.Now()
		j.State, j.Conclusion, j.FinishedAt = ci.StateFinished, ci.ConclusionSuccess, &end
		j.Attempt[0].LogSealed = true
		d.Jobs[storybook.LiveJob] = j
	})
	log.Seal()
	tab.Wait(15*time.Second, `document.querySelector("#follow").hidden && document.title.startsWith("Succeeded")`)
	tab.Wait(15*time.Second, `[...document.querySelectorAll(".ln .t")].some(t => t.textContent === "back again")`)
	clean(t, tab)
}

func pageFollows(t *testing.T, b *testkit.Browser) {
	book := storybook.New(storybook.Sample(), storybook.Now)
	s := serve(t, book)
	tab := b.Tab(t)
	tab.Open(s.URL + "/runs/" + string(storybook.RunningRun))
	tab.Wait(15*time.Second, `document.title.startsWith("Running")`)
	wait(t, 15*time.Second, func() bool { return book.Watching() == 1 })
	// What the visitor does in the page stays: focus, opened details.
	testkit.Eval[bool](tab, `document.querySelector(".group details").open = true, document.querySelector(".group summary").focus(), true`)
	set := func(word string, c ci.Conclusion) {
		book.Edit(func(d *storybook.Data) {
			for i := range d.Runs {
				if d.Runs[i].ID == storybook.RunningRun {
					end := storybook.Now()
					d.Runs[i].State, d.Runs[i].Conclusion, d.Runs[i].FinishedAt = ci.StateFinished, c, &end
				}
			}
		})
		tab.Wait(10*time.Second, `document.title.startsWith("`+word+`")`)
	}
	set("Succeeded", ci.ConclusionSuccess)
	if !testkit.Eval[bool](tab, `document.querySelector(".group details").open && document.activeElement === document.querySelector(".group summary")`) {
		t.Error("bringing the page up to date lost the focus or closed what was open")
	}
	s.CloseClientConnections()
	set("Cancelled", ci.ConclusionCancelled)
	// A machine that slept: the page notices by its clock and asks at once.
	testkit.Eval[bool](tab, `(d => { Date.now = () => d() + 600000; return true; })(Date.now)`)
	set("Failed", ci.ConclusionFailed)
	// A hidden page gives its connection back, and is right when it is seen again.
	hide := func(yes bool) {
		testkit.Eval[bool](tab, fmt.Sprintf(`Object.defineProperty(document, "hidden", {value: %v, configurable: true}), document.dispatchEvent(new Event("visibilitychange"))`, yes))
	}
	hide(true)
	wait(t, 15*time.Second, func() bool { return book.Watching() == 0 })
	book.Edit(func(d *storybook.Data) {
		for i := range d.Runs {
			d.Runs[i].Conclusion = ci.ConclusionTimedOut
		}
	})
	hide(false)
	tab.Wait(10*time.Second, `document.title.startsWith("Timed out")`)
	clean(t, tab)
}

func manyPages(t *testing.T, b *testkit.Browser) {
	book := storybook.New(storybook.Sample(), storybook.Now)
	s := serve(t, book)
	tab := b.Tab(t)
	// Ten pages of one origin; nine of them are hidden, as nine of ten tabs are.
	for range 9 {
		page := b.Tab(t)
		page.Open(s.URL + "/runs/" + string(storybook.RunningRun))
		testkit.Eval[bool](page, `Object.defineProperty(document, "hidden", {value: true}), document.dispatchEvent(new Event("visibilitychange"))`)
	}
	tab.Open(s.URL + "/runs/" + string(storybook.RunningRun))
	wait(t, 15*time.Second, func() bool { return book.Watching() == 1 })
	took := testkit.Eval[float64](tab, `(async t => { await fetch("/runs", {cache: "no-store"}); return performance.now() - t; })(performance.now())`)
	if took > 1000 {
		t.Errorf("a request beside ten pages takes %.0f ms, want under 1 s", took)
	}
}

// narrow looks at every page at the width of a phone.
func narrow(t *testing.T, b *testkit.Browser) {
	tab := b.Tab(t)
	tab.Size(360, 740)
	for _, p := range storybook.Pages() {
		s := serve(t, storybook.New(p.Data(), storybook.Now))
		tab.Open(s.URL + p.Path)
		if over := testkit.Eval[int](tab, `document.documentElement.scrollWidth - document.documentElement.clientWidth`); over > 0 {
			t.Errorf("%s is %d pixels wider than the window", p.Name, over)
		}
	}
}

func wait(t *testing.T, limit time.Duration, f func() bool) {
	t.Helper()
	for start := time.Now(); !f(); time.Sleep(20 * time.Millisecond) {
		if time.Since(start) > limit {
			t.Fatalf("not so after %v", limit)
		}
	}
}
