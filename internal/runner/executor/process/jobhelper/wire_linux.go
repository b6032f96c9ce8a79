package jobhelper

import (
	"io"
	"syscall"
)

// Kind says what a Message is.
type Kind byte

// Messages from the runner. Each concerns the step with the number Seq, or the
// whole job.
const (
	KindOpen   Kind = 'O' // Argv[0]: cgroup version, Argv[1]: directory of the job's cgroup, or none; answered by Ready
	KindStart  Kind = 'S' // start step Seq with two descriptors; answered by Started or Failed, later by Exited
	KindTerm   Kind = 'T' // SIGTERM to step Seq; answered by StepGone when nothing of it is left
	KindKill   Kind = 'K' // SIGKILL to step Seq; answered by StepGone when nothing of it is left
	KindClose  Kind = 'C' // take no more steps, SIGTERM to what is left; answered by Gone when nothing is left
	KindFinish Kind = 'F' // SIGKILL to all of the job; answered by Gone when nothing is left
)

// Messages to the runner.
const (
	KindReady    Kind = 'R' // Text: why there is no cgroup although one was asked for, or empty
	KindStarted  Kind = 'P' // Num: process ID
	KindFailed   Kind = 'E' // Num: errno; Text: what failed
	KindExited   Kind = 'X' // Num: wait status; Nanos: run time
	KindStepGone Kind = 'D'
	KindGone     Kind = 'G' // Num: processes that were alive when Close came; Text: Again, or the helper exits after it
)

// Again in a KindGone says that the helper waits for the KindOpen of another job.
const Again = "again"

// Credential is the user that a step runs as.
type Credential struct {
	UID, GID uint32
	Groups   []uint32
}

// Message is one message in either direction; only the fields that its Kind
// names are meaningful.
type Message struct {
	Kind  Kind
	Seq   uint32
	Num   int64
	Nanos int64
	Text  string
	Dir   string
	Argv  []string
	Env   []string
	// User is nil when the step keeps the runner's user.
	User *Credential
}

const (
	headerSize = 8
	maxPayload = 64 << 20
)

// Encode returns m's header and payload. The runner sends the descriptors of a
// KindStart with the header, in a piece of its own, so that the helper never
// meets them in the middle of a read.
func Encode(m *Message) (header, payload []byte, err error) {
	e := encoder{b: make([]byte, headerSize, 512)}
	e.u32(m.Seq)
	e.u64(uint64(m.Num))
	e.u64(uint64(m.Nanos))
	e.str(m.Text)
	e.str(m.Dir)
	e.list(m.Argv)
	e.list(m.Env)
	if m.User == nil {
		e.u32(0)
	} else {
		e.u32(1)
		e.u32(m.User.UID)
		e.u32(m.User.GID)
		e.u32(uint32(len(m.User.Groups)))
		for _, g := range m.User.Groups {
			e.u32(g)
		}
	}
	size := len(e.b) - headerSize
	if size > maxPayload {
		return nil, nil, syscall.E2BIG
	}
	e.b[0] = byte(m.Kind)
	put32(e.b[4:], uint32(size))
	return e.b[:headerSize], e.b[headerSize:], nil
}

// ReadMessage reads one message without descriptors. It returns io.EOF when the
// other side is gone between messages.
func ReadMessage(r io.Reader) (*Message, error) {
	var header [headerSize]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return nil, err
	}
	return readPayload(r, header)
}

func readPayload(r io.Reader, header [headerSize]byte) (*Message, error) {
	size := get32(header[4:])
	if size > maxPayload {
		return nil, syscall.EBADMSG
	}
	payload := make([]byte, size)
	if _, err := io.ReadFull(r, payload); err != nil {
		return nil, err
	}
	return decode(Kind(header[0]), payload)
}

// control is the helper's end of the socket, in blocking mode.
type control int

// Read implements io.Reader.
func (c control) Read(b []byte) (int, error) {
	for {
		n, err := syscall.Read(int(c), b)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

// write sends one message to the runner.
func (c control) write(m *Message) error {
	header, payload, err := Encode(m)
	if err != nil {
		return err
	}
	for b := append(header, payload...); len(b) > 0; {
		n, err := syscall.SendmsgN(int(c), b, nil, nil, syscall.MSG_NOSIGNAL)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

// receive reads one message of the runner and its descriptors, which are
// close-on-exec.
func (c control) receive() (*Message, []int, error) {
	var header [headerSize]byte
	var fds []int
	for got := 0; got < headerSize; {
		var oob [64]byte
		n, oobn, _, _, err := syscall.Recvmsg(int(c), header[got:], oob[:], syscall.MSG_CMSG_CLOEXEC)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return nil, fds, err
		}
		if n == 0 {
			return nil, fds, io.EOF
		}
		fds = append(fds, parseRights(oob[:oobn])...)
		got += n
	}
	m, err := readPayload(c, header)
	return m, fds, err
}

func parseRights(oob []byte) []int {
	messages, err := syscall.ParseSocketControlMessage(oob)
	if err != nil {
		return nil
	}
	var fds []int
	for i := range messages {
		if got, err := syscall.ParseUnixRights(&messages[i]); err == nil {
			fds = append(fds, got...)
		}
	}
	return fds
}

func decode(kind Kind, payload []byte) (*Message, error) {
	d := decoder{b: payload}
	m := &Message{Kind: kind}
	m.Seq = d.u32()
	m.Num = int64(d.u64())
	m.Nanos = int64(d.u64())
	m.Text = d.str()
	m.Dir = d.str()
	m.Argv = d.list()
	m.Env = d.list()
	if d.u32() == 1 {
		m.User = &Credential{UID: d.u32(), GID: d.u32()}
		n := d.u32()
		for i := uint32(0); i < n && !d.bad; i++ {
			m.User.Groups = append(m.User.Groups, d.u32())
		}
	}
	if d.bad || len(d.b) > 0 {
		return nil, syscall.EBADMSG
	}
	return m, nil
}

type encoder struct{ b []byte }

func (e *encoder) u32(v uint32) {
	e.b = append(e.b, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
}

func (e *encoder) u64(v uint64) {
	e.u32(uint32(v))
	e.u32(uint32(v >> 32))
}

func (e *encoder) str(s string) {
	e.u32(uint32(len(s)))
	e.b = append(e.b, s...)
}

func (e *encoder) list(l []string) {
	e.u32(uint32(len(l)))
	for _, s := range l {
		e.str(s)
	}
}

type decoder struct {
	b   []byte
	bad bool
}

func (d *decoder) take(n uint32) []byte {
	if uint64(n) > uint64(len(d.b)) {
		d.bad, d.b = true, nil
		return nil
	}
	b := d.b[:n]
	d.b = d.b[n:]
	return b
}

func (d *decoder) u32() uint32 {
	b := d.take(4)
	if b == nil {
		return 0
	}
	return get32(b)
}

func (d *decoder) u64() uint64 {
	lo := uint64(d.u32())
	return lo | uint64(d.u32())<<32
}

func (d *decoder) str() string { return string(d.take(d.u32())) }

func (d *decoder) list() []string {
	n := d.u32()
	var l []string
	for i := uint32(0); i < n && !d.bad; i++ {
		l = append(l, d.str())
	}
	return l
}

func put32(b []byte, v uint32) {
	b[0], b[1], b[2], b[3] = byte(v), byte(v>>8), byte(v>>16), byte(v>>24)
}

func get32(b []byte) uint32 {
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}
