package api

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"forgeci/internal/ci"
	"forgeci/internal/server/store"
)

// metrics answers with what the database and the engine count. The database is
// asked at each scrape; nothing is counted twice by several nodes but what each
// of them says of itself.
func (a *API) metrics(w http.ResponseWriter, r *http.Request, _ caller) error {
	reg := prometheus.NewRegistry()
	jobs := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "forgeci_jobs", Help: "Unfinished jobs by state."}, []string{"state"})
	rejected := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "forgeci_stale_result_rejected_total",
		Help: "Lease calls that were refused, by route and reason.",
	}, []string{"route", "reason"})
	runners := prometheus.NewGauge(prometheus.GaugeOpts{Name: "forgeci_sessions_present", Help: "Runner sessions that are present."})
	reg.MustRegister(jobs, rejected, runners)
	err := a.Store.Read(r.Context(), func(tx *store.Tx) error {
		byState, err := tx.JobsByState(r.Context())
		if err != nil {
			return err
		}
		for _, s := range []ci.State{ci.StateWaiting, ci.StateReady, ci.StateRunning, ci.StateCancelling} {
			jobs.WithLabelValues(string(s)).Set(float64(byState[s]))
		}
		sessions, err := tx.PresentSessions(r.Context())
		if err != nil {
			return err
		}
		runners.Set(float64(len(sessions)))
		refused, err := tx.Rejections(r.Context())
		for _, x := range refused {
			rejected.WithLabelValues(x.Route, string(x.Reason)).Add(float64(x.N))
		}
		return err
	})
	if err != nil {
		return err
	}
	promhttp.HandlerFor(reg, promhttp.HandlerOpts{}).ServeHTTP(w, r)
	return nil
}
