package testkit

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
)

// chromium is Debian's browser; axe-core is the checker of accessibility, by
// version and by the digest of its file.
const (
	chromium  = "/usr/bin/chromium"
	axeName   = "axe-core"
	axeWanted = "4.14.1"
	axeDigest = "29348999450cdf2849a8e70b7912fc2da85a849da39c0d0d5394f51d4a9ed95c"
)

// watchScript runs before each page's own: it notes violations of the content
// security policy, and defines the x() that hostile text tries to call.
const watchScript = `
window.__watch = {violations: [], ran: 0};
window.x = () => { window.__watch.ran++; };
document.addEventListener("securitypolicyviolation", e => window.__watch.violations.push(
	e.violatedDirective + " " + e.blockedURI + " " + e.sourceFile + ":" + e.lineNumber + " " + e.sample));`

// Browser is a running Chromium without a window.
type Browser struct {
	ctx context.Context
}

// StartBrowser starts a browser that ends with the test. A machine without one
// fails the test with the remedy.
func StartBrowser(t testing.TB) *Browser {
	t.Helper()
	if _, err := os.Stat(chromium); err != nil {
		t.Fatalf("no browser: %v; install it with: apt-get install -y --no-install-recommends chromium", err)
	}
	ctx, cancelAllocator := chromedp.NewExecAllocator(context.Background(),
		chromedp.ExecPath(chromium), chromedp.UserDataDir(t.TempDir()),
		chromedp.Headless, chromedp.NoSandbox, chromedp.DisableGPU, chromedp.NoFirstRun, chromedp.NoDefaultBrowserCheck,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true),
		chromedp.Flag("disable-component-update", true), chromedp.Flag("disable-sync", true),
		chromedp.Flag("disable-dev-shm-usage", true), chromedp.WindowSize(1280, 900))
	t.Cleanup(cancelAllocator)
	ctx, cancel := chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	version, err := chromedp.Run(ctx, chromedp.Evaluate[string]("navigator.userAgent"))
	if err != nil {
		t.Fatalf("start browser: %v", err)
	}
	if _, after, ok := strings.Cut(version, "Chrome/"); ok {
		version, _, _ = strings.Cut(after, " ")
	}
	RecordVersion(t, "Chromium", version)
	return &Browser{ctx: ctx}
}

// Tab is one tab with cookies and storage of its own. Its methods fail the test
// when the browser does not do what they say.
type Tab struct {
	t   testing.TB
	ctx context.Context

	mu       sync.Mutex
	problems []string // guarded by mu
}

// Tab opens a tab that closes with the test.
func (b *Browser) Tab(t testing.TB) *Tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(b.ctx, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	tab := &Tab{t: t, ctx: ctx}
	// The tab lives as long as the context that opens it: not one with a deadline.
	if err := chromedp.Do(ctx); err != nil {
		t.Fatalf("open tab: %v", err)
	}
	tab.do(chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, page.AddScriptToEvaluateOnNewDocument, page.AddScriptToEvaluateOnNewDocumentParams{Source: watchScript})
		return err
	}))
	tab.do(chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, network.Enable, network.EnableParams{})
		return err
	}))
	messages := chromedp.Console(ctx)
	go func() {
		for m, err := range messages {
			if err != nil {
				return
			}
			if text := m.String(); m.IsException() || m.Type == "error" && !strings.HasPrefix(m.Text, "Failed to load resource") {
				tab.mu.Lock()
				tab.problems = append(tab.problems, text)
				tab.mu.Unlock()
			}
		}
	}()
	return tab
}

func (tab *Tab) do(steps ...chromedp.Action[chromedp.Void]) {
	tab.t.Helper()
	ctx, cancel := context.WithTimeout(tab.ctx, 60*time.Second)
	defer cancel()
	if err := chromedp.Do(ctx, steps...); err != nil {
		tab.t.Fatalf("browser: %v", err)
	}
}

// Open loads an address and waits until the page is loaded.
func (tab *Tab) Open(url string) {
	tab.t.Helper()
	tab.do(chromedp.Navigate(url))
}

// Eval runs an expression of the page, awaiting a promise, and decodes its
// value as JSON.
func Eval[T any](tab *Tab, expression string) T {
	tab.t.Helper()
	ctx, cancel := context.WithTimeout(tab.ctx, 60*time.Second)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		tab.t.Fatalf("browser: evaluate %.200s: %v", expression, err)
	}
	return v
}

// Wait waits until an expression is true, and fails the test after a limit.
func (tab *Tab) Wait(limit time.Duration, expression string) time.Duration {
	tab.t.Helper()
	start := time.Now()
	for {
		if Eval[bool](tab, "!!("+expression+")") {
			return time.Since(start)
		}
		if time.Since(start) > limit {
			tab.t.Fatalf("browser: after %v still not: %s", limit, expression)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// Press sends keys to what has the focus; kb names special ones ("\t", "\r").
func (tab *Tab) Press(keys string) {
	tab.t.Helper()
	tab.do(chromedp.KeyEvent(keys))
}

// Click clicks the first element that a selector matches, once the page is loaded.
func (tab *Tab) Click(selector string) {
	tab.t.Helper()
	tab.Wait(10*time.Second, `document.readyState === "complete"`)
	tab.do(chromedp.Click(chromedp.CSS(selector)))
}

// Size sets the size of the page's window.
func (tab *Tab) Size(width, height int) {
	tab.t.Helper()
	tab.do(chromedp.EmulateViewport(int64(width), int64(height)))
}

// Prefer sets what the visitor's system prefers: a CSS media feature and its value.
func (tab *Tab) Prefer(feature, value string) {
	tab.t.Helper()
	tab.do(chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: feature, Value: value}},
		})
		return err
	}))
}

// Script turns the page's own scripts on or off, from the next page on.
func (tab *Tab) Script(on bool) {
	tab.t.Helper()
	tab.do(chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
		_, err := cdp.Call(ctx, target, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: !on})
		return err
	}))
}

// Screenshot writes the window, or the whole page, as PNG.
func (tab *Tab) Screenshot(file string, whole bool) {
	tab.t.Helper()
	shoot := chromedp.CaptureScreenshot()
	if whole {
		shoot = chromedp.FullScreenshot(100)
	}
	ctx, cancel := context.WithTimeout(tab.ctx, 60*time.Second)
	defer cancel()
	png, err := chromedp.Run(ctx, shoot)
	if err != nil {
		tab.t.Fatalf("browser: screenshot: %v", err)
	}
	if err := os.WriteFile(file, png, 0o644); err != nil {
		tab.t.Fatal(err)
	}
}

// Problems lists what went wrong on the current page: violations of its content
// security policy, hostile text that ran, and exceptions and errors of scripts
// on any page of the tab so far. Requests that fail are not among them: whether
// that is wrong is for the test to say.
func (tab *Tab) Problems() []string {
	tab.t.Helper()
	type watch struct {
		Violations []string `json:"violations"`
		Ran        int      `json:"ran"`
	}
	w := Eval[watch](tab, "window.__watch")
	tab.mu.Lock()
	defer tab.mu.Unlock()
	list := append([]string(nil), tab.problems...)
	for _, v := range w.Violations {
		list = append(list, "content security policy: "+v)
	}
	if w.Ran > 0 {
		list = append(list, fmt.Sprintf("hostile text ran %d times", w.Ran))
	}
	return list
}

// Axe checks the page with axe-core and lists its violations, one line each.
func (tab *Tab) Axe() []string {
	tab.t.Helper()
	Eval[bool](tab, axeSource(tab.t)+"\n;true")
	type node struct {
		HTML    string `json:"html"`
		Summary string `json:"failureSummary"`
	}
	type violation struct {
		ID, Help string
		Nodes    []node
	}
	found := Eval[[]violation](tab, `axe.run(document, {resultTypes: ["violations"]}).then(r => r.violations.map(v => ({ID: v.id, Help: v.help, Nodes: v.nodes.slice(0, 3).map(n => ({html: n.html, failureSummary: n.failureSummary}))})))`)
	var list []string
	for _, v := range found {
		detail, err := json.Marshal(v.Nodes)
		if err != nil {
			tab.t.Fatal(err)
		}
		list = append(list, v.ID+": "+v.Help+" "+string(detail))
	}
	return list
}

// axeSource returns the text of axe-core, fetched once per machine with the
// package manager into the user's cache and checked against its digest.
func axeSource(t testing.TB) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatalf("cache for %s: %v", axeName, err)
	}
	dir := filepath.Join(cache, "forgeci-test", axeName+"-"+axeWanted)
	file := filepath.Join(dir, "node_modules", axeName, "axe.min.js")
	if _, err := os.Stat(file); err != nil {
		if err := installAxe(t, dir); err != nil {
			t.Fatalf("install %s: %v", axeName, err)
		}
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	if got := hex.EncodeToString(sum[:]); got != axeDigest {
		t.Fatalf("%s has the digest %s, want %s", file, got, axeDigest)
	}
	RecordVersion(t, axeName, axeWanted)
	return string(b)
}

// installAxe fills the directory in one step, so that processes that do it at
// the same time do not see each other's half.
func installAxe(t testing.TB, dir string) error {
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return err
	}
	temp, err := os.MkdirTemp(filepath.Dir(dir), "install-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(temp) }()
	cmd := exec.CommandContext(t.Context(), "npm", "install", "--prefix", temp, "--no-save", "--ignore-scripts", "--no-audit", "--no-fund", axeName+"@"+axeWanted)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("npm: %w\n%s", err, out)
	}
	if err := os.Rename(temp, dir); err != nil && !os.IsExist(err) {
		if _, there := os.Stat(dir); there != nil {
			return err
		}
	}
	return nil
}
