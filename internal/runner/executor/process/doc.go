// Package process is the executor of class process: steps are processes of the
// runner's machine, for trusted code.
//
// What it promises is the contract of executortest: a clean environment, no
// descriptor or credential of the runner, the whole process tree ended. What it
// does not promise: files and memory of the runner's own user are within reach
// of a step that runs as that user, and a process that was started by another
// service of the machine on the step's behalf (cron, at, a container engine) is
// not the step's descendant and is not ended. Stronger classes do that.
//
// Each job has a helper process (package jobhelper). Whatever happens to one of
// runner, helper and job, the others end the job's processes:
//
//	step ends          its background processes go on until the job ends
//	job ends           SIGTERM, grace, SIGKILL; proof: the helper has no child
//	                   and the cgroup is empty
//	runner dies        the helper sees the end of its socket and kills all at once
//	helper dies        the runner sees the same, kills the cgroup, and everything
//	                   that fell to the runner as the next subreaper
//	both die           the next runner's Sweep finds the cgroup, and processes by
//	                   a mark in their environment; the last resort, since a
//	                   process can change its environment
package process
