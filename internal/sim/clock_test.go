package sim

import "time"

// clock is a clock that goes at a rate of its own and may be set.
type clock struct {
	at   int64 // true time of the last change
	base int64 // what it showed then
	rate float64
}

func (c *clock) read(now int64) int64 { return c.base + int64(float64(now-c.at)*c.rate) }

// when is the true time at which the clock showed a time, if it was not set since.
func (c *clock) when(now, shown int64) int64 { return now - int64(float64(c.read(now)-shown)/c.rate) }

func (c *clock) setRate(now int64, rate float64) {
	c.base, c.at, c.rate = c.read(now), now, rate
}

func (c *clock) jump(now, delta int64) { c.base, c.at = c.read(now)+delta, now }

const (
	second = int64(time.Second / time.Microsecond)
	ttl    = 60 * time.Second
	ttlUS  = 60 * second
)
