package workflow

import "time"

// Limits bound what a workflow file may ask for. The zero value is of no use;
// DefaultLimits has the documented values.
type Limits struct {
	Bytes      int // size of the file
	Depth      int // nesting of mappings and sequences
	Nodes      int // values (mapping keys not counted), after alias expansion
	Separators int // newlines, commas and opening brackets, in or out of scalars: bounds the parser's memory
	Jobs       int // jobs of a run, legs of matrices counted one by one
	Steps      int // steps of a job
	Legs       int // legs of a matrix
	MatrixKeys int // different keys of a matrix
	PlanBytes  int // text of the whole plan, each leg counted
	PlanValues int // values of the whole plan, each leg counted
	Problems   int // problems reported for one file
	Expression int // bytes of one condition
	Conditions int // bytes of all different conditions of the file
	Pattern    int // bytes of one filter or path pattern
	Value      int // bytes of one matrix value or accepted input
	Timeout    time.Duration
}

// DefaultLimits returns the limits that Parse applies (SPEC WF-1).
func DefaultLimits() Limits {
	return Limits{
		Bytes:      1 << 20,
		Depth:      50,
		Nodes:      10_000,
		Separators: 80_000,
		Jobs:       1000,
		Steps:      100,
		Legs:       256,
		MatrixKeys: 32,
		PlanBytes:  8 << 20,
		PlanValues: 200_000,
		Problems:   50,
		Expression: 2048,
		Conditions: 128 << 10,
		Pattern:    1024,
		Value:      1024,
		Timeout:    30 * 24 * time.Hour,
	}
}
