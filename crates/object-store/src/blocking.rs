//! Blocking calls of asynchronous callers.

use object_store::Result;

/// Runs a blocking call on the pool of the current tokio runtime, or here without one. A call that
/// has begun is finished even if its future is dropped.
pub(crate) async fn run_blocking<T: Send + 'static>(
    call: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => runtime.spawn_blocking(call).await?,
        Err(_) => call(),
    }
}

/// Runs a blocking call that nobody waits for.
pub(crate) fn run_detached(call: impl FnOnce() + Send + 'static) {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn_blocking(call)),
        Err(_) => call(),
    }
}
