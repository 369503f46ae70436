//! Forked children of a test, as a server's workers are: with the memory of the parent and without
//! its threads. For tests that begin with [`in_own_process!`](crate::in_own_process): another test's
//! thread may hold any lock.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::wait::wait_for;

/// A forked child; dropping it kills it.
#[derive(Debug)]
pub struct ForkedChild(Option<Pid>);

impl ForkedChild {
    /// Forks. The child runs `work`, then exits as programs do, with its handlers for that.
    pub fn start(work: impl FnOnce()) -> Self {
        // SAFETY: the child calls what a single-threaded program may call; what of that waits for a
        // lock of another thread is what the test looks for.
        match unsafe { libc::fork() } {
            0 => {
                let done = catch_unwind(AssertUnwindSafe(work));
                std::process::exit(if done.is_ok() { 0 } else { 101 })
            }
            pid => Self(Some(Pid::from_raw(pid).expect("a fork succeeds"))),
        }
    }

    /// Waits for the end of the child, which must not panic.
    #[track_caller]
    pub fn assert_success(mut self) {
        let pid = self.0.expect("not waited for");
        let ended = || waitpid(Some(pid), WaitOptions::NOHANG).expect("it is a child");
        let (_, status) = wait_for("a forked child", ended);
        self.0 = None;
        assert_eq!(status.exit_status(), Some(0), "the forked child: {status:?}");
    }
}

impl Drop for ForkedChild {
    fn drop(&mut self) {
        if let Some(pid) = self.0 {
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}
