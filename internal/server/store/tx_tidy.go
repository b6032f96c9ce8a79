package store

import "context"

// CollectIdempotency forgets callers' keys that were bound before an instant, at
// most limit of them, and returns how many.
func (t *Tx) CollectIdempotency(ctx context.Context, beforeUS int64, limit int) (int64, error) {
	return t.exec(ctx, "IdempotencyCollect", beforeUS, limit)
}

// CollectSessions deletes sessions that ended before an instant and that nothing
// goes by any more, at most limit of them, and returns how many.
func (t *Tx) CollectSessions(ctx context.Context, beforeUS int64, limit int) (int64, error) {
	return t.exec(ctx, "SessionsCollect", beforeUS, limit)
}

// CollectOffers deletes offers that no session makes, at most limit of them, and
// returns how many. The caller holds the lock under which offers are interned.
func (t *Tx) CollectOffers(ctx context.Context, beforeUS int64, limit int) (int64, error) {
	ids, err := query(ctx, t, "OffersUnused", scanString, beforeUS, limit)
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	if _, err := t.exec(ctx, "OffersPart", keys(ids)); err != nil {
		return 0, err
	}
	return t.exec(ctx, "OffersDelete", keys(ids))
}
