package logs

import (
	"container/list"
	"sync"
)

// cache keeps the bytes used last: recent segments, for tails and archiving, and
// frames of archives. What it returns must not be changed.
type cache struct {
	mu    sync.Mutex
	room  int64
	order *list.List // of *cached, used last in front
	by    map[string]*list.Element
}

type cached struct {
	key  string
	data []byte
}

func newCache(size int64) *cache {
	return &cache{room: size, order: list.New(), by: map[string]*list.Element{}}
}

func (c *cache) get(key string) ([]byte, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.by[key]
	if !ok {
		return nil, false
	}
	c.order.MoveToFront(e)
	return e.Value.(*cached).data, true
}

func (c *cache) put(key string, data []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.by[key]; ok {
		return
	}
	c.by[key] = c.order.PushFront(&cached{key, data})
	c.room -= int64(cap(data))
	for c.room < 0 && c.order.Len() > 1 {
		last := c.order.Back()
		old := c.order.Remove(last).(*cached)
		delete(c.by, old.key)
		c.room += int64(cap(old.data))
	}
}
