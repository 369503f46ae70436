//! Injected faults and delays: steps that tests omit to prove that they are needed.
//!
//! Without the feature `omissions`, which only tests enable, everything here is constant. With it,
//! a program omits the steps named in [`FAULTS_VARIABLE`], and passes the variable on to its
//! workers.

/// Environment variable that names injected faults, separated by commas.
pub const FAULTS_VARIABLE: &str = "DRACONIS_BREAK";

/// A step of a mount that correctness needs, and that a test can omit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InjectedFault {
    /// The kernel's pages are invalidated after an asynchronous direct write.
    StalePages,
    /// Cached attributes are invalidated after a change of flags.
    StaleCtimeAfterFlags,
    /// setuid and setgid are cleared before another user's write.
    Privileges,
    /// Immutable and append-only files are not opened for writing.
    OpenFlags,
    /// Cached pages are dropped where reading updates the access time.
    AccessTime,
    /// `O_NOATIME` keeps the access time.
    NoAtime,
    /// File handles resolve to their nodes.
    Handles,
    /// Setting an access ACL clears setgid.
    ListSetgid,
    /// RENAME_WHITEOUT leaves a whiteout.
    Whiteout,
    /// The umask is applied.
    Umask,
    /// Changes of names update the directory's times.
    DirectoryTimes,
    /// Every attribute change updates ctime.
    ChangeTime,
    /// A new link updates ctime, too.
    LinkTime,
    /// Attributes and lengths of append-only files are immutable.
    AppendOnly,
    /// A setgid directory passes its group on.
    GroupOfParent,
    /// XATTR_CREATE fails for an existing attribute.
    NewXattr,
    /// Times out of range are clamped.
    ClampedTimes,
    /// An unnamed file can be linked.
    LinkTmpfile,
    /// A change is in the oplog before it is answered.
    LogFirst,
    /// Changes that only the oplog has are replayed.
    Repeats,
    /// A replayed creation gets its original inode.
    SameInode,
    /// Unsent answers are kept for when the kernel repeats the requests.
    PendingReplies,
    /// Orphans stay while they are open.
    KeepOpenOrphans,
    /// Orphans are recorded for the next worker.
    RecordOrphans,
    /// The kernel resends a dead worker's requests in flight, as it can since Linux 6.9.
    Resend,
    /// A worker survives a lookup of [`CRASHING_NAME`].
    SurviveCrashingName,
}

/// Name that kills a worker: see [`InjectedFault::SurviveCrashingName`].
pub const CRASHING_NAME: &[u8] = b"deadly";

impl InjectedFault {
    /// Faults that show when a worker dies.
    pub const VISIBLE_ON_RESTART: [Self; 6] = [
        Self::LogFirst,
        Self::Repeats,
        Self::SameInode,
        Self::PendingReplies,
        Self::KeepOpenOrphans,
        Self::RecordOrphans,
    ];

    /// Faults that show in single calls.
    pub const ALL: [Self; 18] = [
        Self::StalePages,
        Self::StaleCtimeAfterFlags,
        Self::Privileges,
        Self::OpenFlags,
        Self::AccessTime,
        Self::NoAtime,
        Self::Handles,
        Self::ListSetgid,
        Self::Whiteout,
        Self::Umask,
        Self::DirectoryTimes,
        Self::ChangeTime,
        Self::LinkTime,
        Self::AppendOnly,
        Self::GroupOfParent,
        Self::NewXattr,
        Self::ClampedTimes,
        Self::LinkTmpfile,
    ];

    /// Returns true if the step is omitted.
    #[cfg(not(feature = "omissions"))]
    #[inline]
    pub const fn is_made(self) -> bool {
        false
    }

    /// Returns true if the step is omitted.
    #[cfg(feature = "omissions")]
    pub fn is_made(self) -> bool {
        use std::sync::OnceLock;
        static MADE: OnceLock<Vec<String>> = OnceLock::new();
        let made = MADE.get_or_init(|| {
            let names = std::env::var(FAULTS_VARIABLE).unwrap_or_default();
            names.split(',').map(str::to_string).collect()
        });
        made.iter().any(|made| *made == format!("{self:?}"))
    }
}

/// Environment variable that names the point at which a worker delays.
pub const DELAY_VARIABLE: &str = "DRACONIS_LINGER";

/// Point at which a worker delays each request, so that a killed worker dies there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DelayPoint {
    /// The request was read.
    Read,
    /// Its changes are in memory.
    Applied,
    /// The oplog has it.
    Logged,
    /// The answer was sent.
    Answered,
    /// The disk has accepted a batch of changes.
    Committed,
}

impl DelayPoint {
    /// All points, in the order in which a request passes them.
    pub const ALL: [Self; 5] =
        [Self::Read, Self::Applied, Self::Logged, Self::Answered, Self::Committed];

    /// Delays here if this point is selected.
    #[cfg(not(feature = "omissions"))]
    #[inline]
    pub const fn pass(self) {}

    /// Delays here if this point is selected.
    #[cfg(feature = "omissions")]
    pub fn pass(self) {
        use std::sync::OnceLock;
        static AT: OnceLock<Option<String>> = OnceLock::new();
        let at = AT.get_or_init(|| std::env::var(DELAY_VARIABLE).ok());
        if at.as_ref().is_some_and(|at| *at == format!("{self:?}")) {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
    }
}

/// Returns the environment variables that pass faults and delay on to a worker.
pub fn inherited_variables() -> impl Iterator<Item = (&'static str, String)> {
    let names =
        if cfg!(feature = "omissions") { &[FAULTS_VARIABLE, DELAY_VARIABLE][..] } else { &[] };
    names.iter().filter_map(|name| Some((*name, std::env::var(name).ok()?)))
}
