package web

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"mime"
	"net/http"
	"path"
	"strconv"
	"strings"

	"forgeci/internal/server/web/ansi"
)

//go:embed static
var staticFiles embed.FS

// asset is one file as it is sent.
type asset struct {
	kind          string
	plain, zipped []byte
}

// assets serves style and modules under /static/VERSION/, where the version is
// the digest of them all: an address never changes its bytes.
type assets struct {
	version string
	files   map[string]asset
}

func loadAssets() *assets {
	entries, err := staticFiles.ReadDir("static")
	if err != nil {
		panic("web: " + err.Error())
	}
	a := &assets{files: map[string]asset{}}
	sum := sha256.New()
	add := func(name string, b []byte) {
		var z bytes.Buffer
		w, err := gzip.NewWriterLevel(&z, gzip.BestCompression)
		if err != nil {
			panic("web: " + err.Error())
		}
		_, _ = w.Write(b) // a bytes.Buffer takes everything
		_ = w.Close()
		_, _ = sum.Write([]byte(name + "\x00"))
		_, _ = sum.Write(b)
		kind := mime.TypeByExtension(path.Ext(name))
		switch path.Ext(name) { // independent of the machine's tables
		case ".js":
			kind = "text/javascript; charset=utf-8"
		case ".css":
			kind = "text/css; charset=utf-8"
		case ".svg":
			kind = "image/svg+xml"
		}
		a.files[name] = asset{kind, b, z.Bytes()}
	}
	for _, e := range entries {
		b, err := staticFiles.ReadFile("static/" + e.Name())
		if err != nil {
			panic("web: " + err.Error())
		}
		add(e.Name(), b)
	}
	add("ansi.css", []byte(ansi.Stylesheet()))
	a.version = hex.EncodeToString(sum.Sum(nil))[:12]
	return a
}

// URL returns the address of a file.
func (a *assets) URL(name string) string { return "/static/" + a.version + "/" + name }

func (a *assets) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f, ok := a.files[r.PathValue("file")]
	if !ok {
		http.NotFound(w, r)
		return
	}
	if r.PathValue("version") == a.version {
		w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
	}
	a.send(w, r, f)
}

func (a *assets) favicon(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Cache-Control", "public, max-age=86400")
	a.send(w, r, a.files["icon.svg"])
}

func (a *assets) send(w http.ResponseWriter, r *http.Request, f asset) {
	h := w.Header()
	h.Set("Content-Type", f.kind)
	h.Set("Vary", "Accept-Encoding")
	body := f.plain
	if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		h.Set("Content-Encoding", "gzip")
		body = f.zipped
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	_, _ = w.Write(body) // the browser may have left
}
