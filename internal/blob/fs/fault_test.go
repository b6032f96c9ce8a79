package fs

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"forgeci/internal/blob"
	"forgeci/internal/ci"
)

func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(dir, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func put(t testing.TB, s *Store, key string, data []byte) error {
	t.Helper()
	return s.PutNew(t.Context(), key, bytes.NewReader(data), int64(len(data)), sha256.Sum256(data))
}

// files lists all regular files below dir.
func files(t *testing.T, dir string) []string {
	t.Helper()
	var found []string
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			found = append(found, strings.TrimPrefix(path, dir+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// RELIABILITY R13: a full disk and a failed sync of a file are ErrUnavailable,
// leave nothing, visible or not, and the same call succeeds when the disk is
// well again.
func TestDiskFaultsOfAFile(t *testing.T) {
	t.Parallel()
	for name, fault := range map[string]struct {
		disk func(d *disk)
		why  error
	}{
		"disk full at once": {func(d *disk) {
			d.write = func(*os.File, []byte) (int, error) { return 0, syscall.ENOSPC }
		}, syscall.ENOSPC},
		"disk full half-way": {func(d *disk) {
			d.write = func(f *os.File, p []byte) (int, error) {
				n, _ := f.Write(p[:len(p)/2])
				return n, syscall.ENOSPC
			}
		}, syscall.ENOSPC},
		"sync fails": {func(d *disk) {
			d.sync = func(*os.File) error { return syscall.EIO }
		}, syscall.EIO},
	} {
		for _, size := range []int{10, 3 << 20} {
			t.Run(fmt.Sprintf("%s/%d", name, size), func(t *testing.T) {
				t.Parallel()
				dir := t.TempDir()
				s := openStore(t, dir)
				data := bytes.Repeat([]byte("x"), size)
				well := s.disk
				fault.disk(&s.disk)
				for range 2 {
					if err := put(t, s, "a/b", data); !errors.Is(err, ci.ErrUnavailable) || !errors.Is(err, fault.why) {
						t.Errorf("PutNew: %v, want ErrUnavailable with the cause", err)
					}
					if _, err := s.NewUpload(t.Context(), "a/u", 10, [32]byte{}); !errors.Is(err, ci.ErrUnavailable) {
						t.Errorf("NewUpload: %v, want ErrUnavailable", err)
					}
				}
				if left := files(t, dir); len(left) > 0 {
					t.Errorf("left: %q", left)
				}
				s.disk = well
				if err := put(t, s, "a/b", data); err != nil {
					t.Errorf("after the fault: %v", err)
				}
				r, err := s.Open(t.Context(), "a/b", 0, -1)
				if err != nil {
					t.Fatal(err)
				}
				defer r.Close()
				if got, err := io.ReadAll(r); !bytes.Equal(got, data) {
					t.Errorf("%d other bytes, %v", len(got), err)
				}
			})
		}
	}
}

// After a failed sync of a directory nothing more is acknowledged until the
// store is opened again; reading goes on.
func TestFailedDirectorySyncStopsWrites(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := openStore(t, dir)
	if err := put(t, s, "a/before", []byte("x")); err != nil {
		t.Fatal(err)
	}
	well := s.disk
	s.disk.syncDir = func(string) error { return syscall.EIO }
	if err := put(t, s, "a/during", []byte("x")); !errors.Is(err, ci.ErrUnavailable) {
		t.Errorf("PutNew: %v, want ErrUnavailable", err)
	}
	s.disk = well
	// The kernel would say that all is well now; it is not known to be.
	for _, key := range []string{"a/during", "a/after"} {
		if err := put(t, s, key, []byte("x")); !errors.Is(err, ci.ErrUnavailable) {
			t.Errorf("PutNew %s: %v, want ErrUnavailable", key, err)
		}
	}
	if _, err := s.Stat(t.Context(), "a/before"); err != nil {
		t.Errorf("Stat: %v", err)
	}
	again := openStore(t, dir)
	for _, key := range []string{"a/before", "a/during", "a/after"} {
		if err := put(t, again, key, []byte("x")); err != nil {
			t.Errorf("PutNew %s after opening again: %v", key, err)
		}
	}
}

// A directory that cannot be opened for its sync, as in a process that has too many
// files open, fails the call and nothing more: the same call succeeds later.
func TestUnopenedDirectoryStopsNothing(t *testing.T) {
	t.Parallel()
	s := openStore(t, t.TempDir())
	if err := put(t, s, "a/before", []byte("x")); err != nil {
		t.Fatal(err)
	}
	well := s.disk
	s.disk.syncDir = func(path string) error { return syncDir(path + strings.Repeat("x", 300)) }
	if err := put(t, s, "a/during", []byte("x")); !errors.Is(err, ci.ErrUnavailable) || !errors.Is(err, syscall.ENAMETOOLONG) {
		t.Errorf("PutNew: %v, want ErrUnavailable with the cause", err)
	}
	s.disk = well
	for _, key := range []string{"a/during", "a/after"} {
		if err := put(t, s, key, []byte("x")); err != nil {
			t.Errorf("PutNew %s: %v", key, err)
		}
	}
}

// An object is acknowledged only after its file and then its directory, and
// each directory that was made for it, have been synced.
func TestDurabilityOrder(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := openStore(t, dir)
	var mu sync.Mutex
	var log []string
	note := func(what, path string) {
		mu.Lock()
		defer mu.Unlock()
		log = append(log, what+" "+strings.TrimPrefix(strings.TrimPrefix(path, dir), "/"))
	}
	real := s.disk
	s.disk.sync = func(f *os.File) error { note("file", ""); return real.sync(f) }
	s.disk.syncDir = func(path string) error { note("dir", path); return real.syncDir(path) }
	for _, c := range []struct{ key, want string }{
		{"a/b/one", "file |dir |dir objects|dir objects/a|dir objects/a/b"},
		{"a/b/two", "file |dir objects/a/b"},
		{"a/three", "file |dir objects/a"},
		{"a/b/two", "dir objects/a/b"}, // a repeat may overtake the first one's sync
	} {
		log = nil
		if err := put(t, s, c.key, []byte("x")); err != nil {
			t.Fatal(err)
		}
		if got := strings.Join(log, "|"); got != c.want {
			t.Errorf("%s: %q, want %q", c.key, got, c.want)
		}
	}
}

// One sync of a directory serves all who wait, and each of them waits for one
// that began after its call.
func TestDirectorySyncsAreShared(t *testing.T) {
	t.Parallel()
	var begun atomic.Int64
	gate := make(chan struct{})
	started := make(chan struct{}, 100)
	d := dirSyncer{sync: func(string) error {
		begun.Add(1)
		started <- struct{}{}
		<-gate
		return nil
	}}
	const callers = 20
	var wg sync.WaitGroup
	wg.Go(func() { _ = d.commit("x") })
	<-started // the first is under way: the others need a later one
	for range callers {
		wg.Go(func() { _ = d.commit("x") })
	}
	for waiting := 0; waiting < callers+1; {
		d.mu.Lock()
		waiting = d.dirs["x"].users
		d.mu.Unlock()
	}
	close(gate)
	wg.Wait()
	if n := begun.Load(); n != 2 {
		t.Errorf("%d syncs for %d callers, want 2", n, callers+1)
	}
	if len(d.dirs) != 0 {
		t.Errorf("%d directories remembered", len(d.dirs))
	}
}

// What a crashed process left is removed when the store is opened; what a
// living one is writing is not.
func TestOpenSweepsWhatACrashLeft(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	living := openStore(t, dir)
	half := filepath.Join(living.tmp, "being-written")
	if err := os.WriteFile(half, []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(dir, "tmp", "0123456789abcdef")
	if err := os.MkdirAll(filepath.Join(dead, "upload-x"), 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"1", "upload-x/meta"} {
		if err := os.WriteFile(filepath.Join(dead, name), []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := put(t, living, "a/b", []byte("kept")); err != nil {
		t.Fatal(err)
	}
	up, err := living.NewUpload(t.Context(), "a/u", 1, [32]byte{})
	if err != nil {
		t.Fatal(err)
	}
	second := openStore(t, dir)
	if _, err := os.Stat(dead); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what the crash left is there: %v", err)
	}
	if _, err := os.Stat(half); err != nil {
		t.Errorf("what a living process writes is gone: %v", err)
	}
	if _, err := second.Stat(t.Context(), "a/b"); err != nil {
		t.Errorf("Stat: %v", err)
	}
	if parts, err := second.Parts(t.Context(), up); err != nil || len(parts) != 0 {
		t.Errorf("Parts: %v, %v", parts, err)
	}
}

// An upload whose record is damaged keeps no other from being found.
func TestADamagedUploadHidesNoOther(t *testing.T) {
	t.Parallel()
	s := openStore(t, t.TempDir())
	var ups []blob.Upload
	for i := range 3 {
		up, err := s.NewUpload(t.Context(), fmt.Sprintf("a/%d", i), 1, [32]byte{})
		if err != nil {
			t.Fatal(err)
		}
		ups = append(ups, up)
	}
	if err := os.Truncate(filepath.Join(s.dir, "uploads", ups[1].ID, "meta"), 5); err != nil {
		t.Fatal(err)
	}
	found, err := s.Uploads(t.Context(), "a/")
	if !errors.Is(err, ci.ErrDigest) {
		t.Errorf("error %v, want ErrDigest", err)
	}
	keys := map[string]bool{}
	for _, up := range found {
		keys[up.Key] = true
	}
	if len(found) != 2 || !keys["a/0"] || !keys["a/2"] {
		t.Errorf("found %v", keys)
	}
}

// Two processes on one directory, as two nodes on one machine: one winner.
func TestTwoStoresOnOneDirectory(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	stores := []*Store{openStore(t, dir), openStore(t, dir)}
	for round := range 20 {
		key := fmt.Sprintf("race/%d/x", round)
		errs := make([]error, 2)
		var wg sync.WaitGroup
		for i, s := range stores {
			wg.Go(func() { errs[i] = put(t, s, key, []byte{byte(i)}) })
		}
		wg.Wait()
		if (errs[0] == nil) == (errs[1] == nil) {
			t.Errorf("round %d: %v and %v, want one winner", round, errs[0], errs[1])
		}
		// Delete takes the directory away while the other store knows it.
		if err := stores[round%2].Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		if err := put(t, stores[1-round%2], key, []byte("again")); err != nil {
			t.Fatal(err)
		}
		if err := stores[0].Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
}

// ATTACKS S54: a file that was damaged in the store is not served.
func TestDamagedFilesAreNotServed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s := openStore(t, dir)
	for name, damage := range map[string]func(path string) error{
		"cut":    func(p string) error { return os.Truncate(p, headerSize+1) },
		"header": func(p string) error { return os.Truncate(p, 10) },
		"empty":  func(p string) error { return os.Truncate(p, 0) },
		"longer": func(p string) error { return os.Truncate(p, headerSize+1000) },
		"magic":  func(p string) error { return os.WriteFile(p, make([]byte, headerSize+5), 0o600) },
	} {
		key := "d/" + name
		if err := put(t, s, key, []byte("12345")); err != nil {
			t.Fatal(err)
		}
		if err := damage(s.path(key)); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Stat(t.Context(), key); !errors.Is(err, ci.ErrDigest) {
			t.Errorf("%s: Stat: %v, want ErrDigest", name, err)
		}
		if _, err := s.Open(t.Context(), key, 0, -1); !errors.Is(err, ci.ErrDigest) {
			t.Errorf("%s: Open: %v, want ErrDigest", name, err)
		}
		if err := put(t, s, key, []byte("12345")); !errors.Is(err, ci.ErrDigest) {
			t.Errorf("%s: PutNew: %v, want ErrDigest", name, err)
		}
	}
}

// ATTACKS S46: no two claims sign the same bytes, and a changed field breaks
// the signature.
func TestAttack_S46_ClaimsAreSignedInjectively(t *testing.T) {
	t.Parallel()
	// Fields whose concatenations meet everywhere.
	texts := []string{"", "a", "b", "ab", "ba", "aa", "a\x00", "\x00a", "part", "get", "partget", "0", "1", "10", "a/b", "a&b", "a=b"}
	numbers := []int64{0, 1, 10, 100, 256, 1 << 32, -1}
	sums := [][32]byte{{}, {1}, {31: 1}, sha256.Sum256(nil)}
	seen := map[string]claim{}
	count := 0
	for _, op := range texts[6:11] {
		for _, key := range texts {
			for _, upload := range texts {
				for _, part := range numbers[:3] {
					for _, size := range numbers[:4] {
						for i, sum := range sums[:3] {
							c := claim{op: op, key: key, upload: upload, part: int(part), size: size, sum: sum, expires: numbers[(i+len(key))%len(numbers)]}
							signed := string(c.signed())
							if other, ok := seen[signed]; ok {
								t.Fatalf("%+v and %+v sign the same bytes", c, other)
							}
							seen[signed] = c
							count++
						}
					}
				}
			}
		}
	}
	t.Logf("%d claims, %d pairs", count, count*(count-1)/2)
}

// FuzzClaim: a query is accepted only in the one form that it is written in, and
// any two different queries differ in what is signed.
func FuzzClaim(f *testing.F) {
	key := []byte("key")
	c := claim{op: opPart, key: "a/b", upload: "0123", part: 3, size: 5, sum: [32]byte{1}, expires: 1700000000}
	f.Add(c.query(c.mac(key)), "x")
	f.Add("op=get&key=a", "expires=1&key=a&mac=&op=get&part=0&sha256=&size=0&upload=")
	f.Fuzz(func(t *testing.T, one, two string) {
		a, macA, okA := parseClaim(one)
		b, macB, okB := parseClaim(two)
		if okA && a.query(macA) != one {
			t.Errorf("%q is accepted for %q", one, a.query(macA))
		}
		if okA && okB && one != two && a == b && bytes.Equal(macA, macB) {
			t.Errorf("%q and %q are one claim", one, two)
		}
		if okA && okB && a != b && bytes.Equal(a.signed(), b.signed()) {
			t.Errorf("%+v and %+v sign the same bytes", a, b)
		}
		if okA && bytes.Equal(macA, a.mac(key)) && a != c {
			t.Errorf("forged: %q", one)
		}
	})
}

// A URL signed with another key is refused; nodes with one key accept each
// other's.
func TestSignKey(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	open := func(key string) *Store {
		s, err := Open(dir, Options{SignKey: []byte(key)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close() })
		return s
	}
	one, same, other := open("k1"), open("k1"), open("k2")
	req, err := one.GetURL(t.Context(), "a/b", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	_, query, _ := strings.Cut(req.URL, "?")
	if _, err := same.authorise(query); err != nil {
		t.Errorf("the same key: %v", err)
	}
	for name, s := range map[string]*Store{"another key": other, "a random key": openStore(t, dir)} {
		if _, err := s.authorise(query); !errors.Is(err, ci.ErrForbidden) {
			t.Errorf("%s: error %v, want ErrForbidden", name, err)
		}
	}
}

// BenchmarkPutNewSmall measures a log segment's way to disk: 4 KiB objects,
// each acknowledged durable, by one writer and by sixteen.
func BenchmarkPutNewSmall(b *testing.B) {
	for _, writers := range []int{1, 16} {
		b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
			s := openStore(b, b.TempDir())
			data := bytes.Repeat([]byte("0123456789abcdef"), 256)
			sum := sha256.Sum256(data)
			b.SetBytes(int64(len(data)))
			b.ReportAllocs()
			b.ResetTimer()
			var next atomic.Int64
			var wg sync.WaitGroup
			for range writers {
				wg.Go(func() {
					for {
						n := next.Add(1)
						if n > int64(b.N) {
							return
						}
						if err := s.PutNew(b.Context(), fmt.Sprintf("logs/%d", n), bytes.NewReader(data), int64(len(data)), sum); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
	b.Run("fsync alone", func(b *testing.B) {
		f, err := os.Create(filepath.Join(b.TempDir(), "f"))
		if err != nil {
			b.Fatal(err)
		}
		defer f.Close()
		data := make([]byte, 4096)
		for b.Loop() {
			if _, err := f.Write(data); err != nil {
				b.Fatal(err)
			}
			if err := f.Sync(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func TestTemporaryDirectoriesDoNotAddUp(t *testing.T) {
	t.Parallel()
	s, err := Open(t.TempDir(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for i := range 5 * filesMost {
		if err := put(t, s, fmt.Sprintf("k/%d", i), nil); err != nil {
			t.Fatal(err)
		}
	}
	dirs, err := filepath.Glob(filepath.Join(s.tmp, "*"))
	if err != nil || len(dirs) == 0 || len(dirs) > 3 {
		t.Errorf("%d directories: %v, %v", len(dirs), dirs, err)
	}
}

// A directory that goes with its last object and is made anew for another's never
// fails either, nor loses one.
func TestObjectsComeAndGoInOneDirectory(t *testing.T) {
	t.Parallel()
	s := openStore(t, t.TempDir())
	var all sync.WaitGroup
	for who := range 4 {
		all.Go(func() {
			for i := range 300 {
				key := fmt.Sprintf("deep/deeper/%d/%d-%d", i%2, who, i)
				if err := put(t, s, key, []byte(key)); err != nil {
					t.Error(err)
					return
				}
				if got, err := s.Stat(t.Context(), key); err != nil || got.Size != int64(len(key)) {
					t.Errorf("%s is stored: %+v, %v", key, got, err)
				}
				if err := s.Delete(t.Context(), key); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if left, err := os.ReadDir(filepath.Join(s.dir, "objects")); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
