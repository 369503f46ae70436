//! Waiting, for tests. Law: no test fails because it was slow. A wait polls a condition and gives
//! up only at [`HANG_BOUND`]; only this file sleeps or reads a clock to bound a wait.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Bound against hanging: far more than anything takes beside other load.
pub const HANG_BOUND: Duration = Duration::from_secs(300);

const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Returns the time at which whoever waits from now on gives up.
pub fn hang_deadline() -> Instant {
    Instant::now() + HANG_BOUND
}

/// Waits until `condition` holds; panics with `what` if it never does.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    wait_for(what, || condition().then_some(()));
}

/// Waits until `poll` returns a value; panics with `what` if it never does.
#[track_caller]
pub fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = hang_deadline();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited {HANG_BOUND:?} in vain: {what}");
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Runs `call` in a thread; panics with `what` if it does not return.
#[track_caller]
pub fn assert_returns<T: Send + 'static>(
    what: &str,
    call: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (send, result) = channel();
    let thread = std::thread::spawn(move || {
        let _ = send.send(call());
    });
    match result.recv_timeout(HANG_BOUND) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("{what} did not return within {HANG_BOUND:?}"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => panic!("{what} returned nothing"),
        },
    }
}

/// Lets time pass where the passing of time is what a test needs: between requests of a paced
/// workload, before a kill at a random moment, while nothing may happen. `why` says which. The
/// result of a test must not depend on how long the pause really was.
pub fn pause(why: &str, duration: Duration) {
    assert!(!why.is_empty(), "a pause has a reason");
    std::thread::sleep(duration);
}
