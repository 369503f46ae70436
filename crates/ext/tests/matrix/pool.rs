//! A small thread pool.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Limit of a panic message.
const MAX_PANIC_MESSAGE_BYTES: usize = 1500;

/// Returns the results of `work` in order; a panic gives its message.
pub fn run_each_in_threads<T: Sync, R: Send>(
    threads: usize,
    things: &[T],
    work: impl Fn(&T) -> R + Sync,
) -> Vec<Result<R, String>> {
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..threads.min(things.len()) {
            scope.spawn(|| {
                loop {
                    let nth = next.fetch_add(1, Ordering::Relaxed);
                    let Some(thing) = things.get(nth) else { return };
                    let result =
                        catch_unwind(AssertUnwindSafe(|| work(thing))).map_err(panic_message);
                    results.lock().unwrap().push((nth, result));
                }
            });
        }
    });
    let mut results = results.into_inner().unwrap();
    results.sort_by_key(|(nth, _)| *nth);
    results.into_iter().map(|(_, result)| result).collect()
}

/// Returns the message of a panic.
pub fn panic_message(panic: Box<dyn Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => text.chars().take(MAX_PANIC_MESSAGE_BYTES).collect(),
        Err(panic) => {
            panic.downcast::<&str>().map_or_else(|_| "a panic".into(), |it| (*it).to_owned())
        }
    }
}
