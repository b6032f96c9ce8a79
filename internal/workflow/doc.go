// Package workflow turns the bytes of a workflow file into a ci.Plan.
//
// Parse reads and validates a file and finds every problem in it at once, each
// with its place, the offending text and the fix. (*File).Compile expands
// matrices, copies defaults down and interpolates accepted inputs; the same
// bytes and inputs always give the same plan. EvalJobIf and EvalStepIf decide
// conditions, MatchFilter decides branch, tag and path filters.
//
// The package does no I/O (Discover only lists names of an fs.FS), keeps no
// state and is safe for concurrent use. What comes in is untrusted: every
// function is bounded in time and memory by Limits and none panics.
//
// The reference for authors is docs/workflow.md.
package workflow
