//! Activity of an exported disk, for status.

/// What clients of an export have done since its start, and do now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportActivity {
    /// Clients that use the export now.
    pub clients: u64,
    /// Requests.
    pub requests: u64,
    /// Bytes of successful reads.
    pub read_bytes: u64,
    /// Bytes of successful writes.
    pub written_bytes: u64,
    /// Names of the clones in use.
    pub clones: Vec<String>,
    /// The latest error, for people.
    pub last_error: Option<String>,
}
