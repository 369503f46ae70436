//! Options of the server.

/// Tasks of the kernel, and polling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServerOptions {
    /// Check permissions by owner, mode and ACL.
    pub permissions: bool,
    /// Use the writeback cache. Many small writes become few. But every file that was written,
    /// renamed or unlinked costs one more request, since the kernel keeps its times. A lack of
    /// space is reported late.
    pub write_back: bool,
    /// Sleep until a request arrives, instead of busy-polling for a while.
    pub no_polling: bool,
    /// Have the kernel send requests over rings.
    pub over_rings: bool,
}
