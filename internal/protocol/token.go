package protocol

import (
	"crypto/rand"
	"hash/crc32"
	"math/big"
	"strings"
)

// TokenKind is the prefix of a token's text.
type TokenKind string

// Kinds of tokens.
const (
	TokenAdmin        TokenKind = "fca"
	TokenRegistration TokenKind = "fcr"
	TokenRunner       TokenKind = "fcn"
)

const (
	base62       = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	tokenRandom  = 30 // characters, 178 bits
	tokenCheck   = 6  // characters, CRC-32 of what stands before
	tokenTextLen = tokenRandom + tokenCheck
)

// NewToken returns a fresh token text: kind, "_", 30 random base62 characters
// and 6 that hold the CRC-32 (IEEE) of everything before them, so that scanners
// can tell a real token from a look-alike offline.
func NewToken(kind TokenKind) string {
	b := []byte(string(kind) + "_")
	for range tokenRandom {
		n, err := rand.Int(rand.Reader, big.NewInt(int64(len(base62))))
		if err != nil {
			panic("protocol: random source failed: " + err.Error()) // without it nothing is safe
		}
		b = append(b, base62[n.Int64()])
	}
	return string(append(b, checksum(b)...))
}

// ValidToken reports whether s has the form and checksum of a token of the kind.
func ValidToken(s string, kind TokenKind) bool {
	rest, ok := strings.CutPrefix(s, string(kind)+"_")
	if !ok || len(rest) != tokenTextLen {
		return false
	}
	for i := range len(rest) {
		if strings.IndexByte(base62, rest[i]) < 0 {
			return false
		}
	}
	body := s[:len(s)-tokenCheck]
	return string(checksum([]byte(body))) == s[len(s)-tokenCheck:]
}

// KindOfToken returns the kind whose form and checksum s has, or "".
func KindOfToken(s string) TokenKind {
	for _, k := range []TokenKind{TokenAdmin, TokenRegistration, TokenRunner} {
		if ValidToken(s, k) {
			return k
		}
	}
	return ""
}

func checksum(b []byte) []byte {
	sum := crc32.ChecksumIEEE(b)
	var out [tokenCheck]byte
	for i := tokenCheck - 1; i >= 0; i-- {
		out[i] = base62[sum%62]
		sum /= 62
	}
	return out[:]
}
