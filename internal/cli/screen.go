package cli

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/mattn/go-isatty"

	"forgeci/internal/ci"
)

// style is an SGR parameter.
type style string

// Styles.
const (
	plain  style = ""
	bold   style = "1"
	dim    style = "2"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
	blue   style = "34"
	cyan   style = "36"
)

// screen is one output stream. It is safe for concurrent use.
type screen struct {
	mu sync.Mutex
	w  io.Writer
	// terminal says that a terminal shows what is written.
	terminal bool
	// color says that colours may be used.
	color bool
	// failed is the first error of writing, guarded by mu.
	failed error
}

func newScreen(w io.Writer, noColor bool) *screen {
	s := &screen{w: w}
	if f, ok := w.(*os.File); ok {
		s.terminal = isatty.IsTerminal(f.Fd()) || isatty.IsCygwinTerminal(f.Fd())
	}
	s.color = s.terminal && !noColor
	return s
}

// Write passes bytes on.
func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, err := s.w.Write(p)
	if err != nil && s.failed == nil {
		s.failed = err
	}
	return n, err
}

// err returns why something was not written, nil when all was.
func (s *screen) err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.failed
}

// line writes one line. What it holds has been cleaned by the caller.
func (s *screen) line(text string) {
	// Nothing can be said where nothing can be written; the exit code says it.
	_, _ = io.WriteString(s, text+"\n")
}

// linef formats a line; string arguments are cleaned.
func (s *screen) linef(format string, args ...any) {
	for i, v := range args {
		if text, ok := v.(string); ok {
			args[i] = clean(text)
		}
	}
	s.line(fmt.Sprintf(format, args...))
}

// paint colours text where colours are wanted.
func (s *screen) paint(st style, text string) string {
	if !s.color || st == plain || text == "" {
		return text
	}
	return "\x1b[" + string(st) + "m" + text + "\x1b[0m"
}

// clean makes text of others safe to show in one line: control characters and
// characters that turn the direction of writing become visible escapes.
func clean(text string) string { return escape(text, "") }

// cleanText is clean for text that may have several lines.
func cleanText(text string) string { return escape(text, "\n") }

func escape(text, keep string) string {
	var b strings.Builder
	for i := 0; i < len(text); {
		r, n := utf8.DecodeRuneInString(text[i:])
		switch {
		case r == utf8.RuneError && n == 1:
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case hidden(r) && !strings.ContainsRune(keep, r):
			b.WriteString(visible(r))
		default:
			b.WriteString(text[i : i+n])
		}
		i += n
	}
	return b.String()
}

// hidden reports whether a terminal acts on r or hides it instead of showing it.
func hidden(r rune) bool {
	return unicode.IsControl(r) || r == '\u2028' || r == '\u2029' ||
		unicode.Is(unicode.Bidi_Control, r)
}

// visible writes a character that must not be acted on.
func visible(r rune) string {
	switch {
	case r == '\n':
		return `\n`
	case r == '\t':
		return `\t`
	case r == '\r':
		return `\r`
	case r < 0x20:
		return "^" + string(r+'@')
	case r == 0x7f:
		return "^?"
	default:
		return fmt.Sprintf(`\u%04x`, r)
	}
}

// cell is one field of a table.
type cell struct {
	text  string
	style style
}

// table collects rows and writes them with aligned columns.
type table struct {
	head []string
	rows [][]cell
}

func (t *table) add(cells ...cell) { t.rows = append(t.rows, cells) }

func text(s string) cell { return cell{text: clean(s)} }

func textf(format string, args ...any) cell { return text(fmt.Sprintf(format, args...)) }

func dimmed(s string) cell { return cell{clean(s), dim} }

// write prints the table; without rows it prints empty, to standard error in the
// caller's hands, nothing.
func (t *table) write(s *screen) {
	width := make([]int, len(t.head))
	rows := t.rows
	if len(t.head) > 0 {
		head := make([]cell, len(t.head))
		for i, h := range t.head {
			head[i] = cell{h, dim}
		}
		rows = append([][]cell{head}, rows...)
	}
	for _, row := range rows {
		for len(width) < len(row) {
			width = append(width, 0)
		}
		for i, c := range row {
			width[i] = max(width[i], utf8.RuneCountInString(c.text))
		}
	}
	for _, row := range rows {
		var b strings.Builder
		last := len(row) - 1
		for last > 0 && row[last].text == "" {
			last--
		}
		for i, c := range row[:last+1] {
			b.WriteString(s.paint(c.style, c.text))
			if i < last {
				b.WriteString(strings.Repeat(" ", width[i]-utf8.RuneCountInString(c.text)+2))
			}
		}
		s.line(b.String())
	}
}

// ago renders an instant relative to now.
func (a *app) ago(t time.Time) string {
	d := a.Now().Sub(t)
	switch {
	case d < 0:
		return "now"
	case d < time.Minute:
		return fmt.Sprintf("%ds ago", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm ago", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh ago", int(d.Hours()))
	case d < 30*24*time.Hour:
		return fmt.Sprintf("%dd ago", int(d.Hours()/24))
	default:
		return t.UTC().Format(time.DateOnly)
	}
}

// took renders the time between two instants; to is now when it is not known.
func (a *app) took(from, to *time.Time) string {
	if from == nil {
		return ""
	}
	end := a.Now()
	if to != nil {
		end = *to
	}
	return span(max(end.Sub(*from), 0))
}

// span renders a duration in two units at most.
func span(d time.Duration) string {
	switch {
	case d < time.Second:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case d < 10*time.Second:
		return fmt.Sprintf("%.1fs", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", int(d.Minutes()), int(d.Seconds())%60)
	default:
		return fmt.Sprintf("%dh%02dm", int(d.Hours()), int(d.Minutes())%60)
	}
}

// size renders a number of bytes.
func size(n int64) string {
	const unit = 1024
	if n < unit {
		return fmt.Sprintf("%d B", n)
	}
	f, i := float64(n)/unit, 0
	for f >= unit && i < len(units)-1 {
		f /= unit
		i++
	}
	return fmt.Sprintf("%.1f %ciB", f, units[i])
}

const units = "KMGT"

// status is the word for where a run or job is: its conclusion once it has one.
func status(s ci.State, c ci.Conclusion, warnings bool) cell {
	if s != ci.StateFinished {
		st := plain
		switch s {
		case ci.StateRunning:
			st = blue
		case ci.StateCancelling:
			st = yellow
		case ci.StateReady, ci.StateWaiting:
			st = dim
		default:
		}
		return cell{clean(string(s)), st}
	}
	st := plain
	switch c {
	case ci.ConclusionSuccess, ci.ConclusionCached:
		st = green
		if warnings {
			return cell{clean(string(c)) + " with warnings", yellow}
		}
	case ci.ConclusionFailed, ci.ConclusionTimedOut, ci.ConclusionAborted:
		st = red
	case ci.ConclusionCancelled:
		st = yellow
	case ci.ConclusionSkipped:
		st = dim
	default:
	}
	return cell{clean(string(c)), st}
}
