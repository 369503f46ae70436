//! What tests leave out, to see that it is missed, and where they have a worker linger.
//!
//! Without the feature `omissions`, which nothing but tests has, everything here is a
//! constant. With it a program leaves out what the variable [`FAULTS_VARIABLE`] names, and hands
//! that on to its workers.

/// The variable of the environment that names omissions, separated by commas.
pub const FAULTS_VARIABLE: &str = "DRACONIS_BREAK";

/// Something that a mount does and that its exactness needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum InjectedFault {
    /// The kernel drops its pages behind an asynchronous direct write.
    StalePages,
    /// It asks for attributes again once flags have changed.
    StaleCtimeAfterFlags,
    /// Privileges go before another's write.
    Privileges,
    /// Immutable and append-only files are not opened for writing.
    OpenFlags,
    /// Pages are fetched again where reading changes the time of access.
    AccessTime,
    /// `O_NOATIME` leaves the time of access.
    NoAtime,
    /// What a file handle names is found.
    Handles,
    /// An access list takes setgid away.
    ListSetgid,
    /// A whiteout stays where a name was.
    Whiteout,
    /// The umask.
    Umask,
    /// A directory's times change with its names.
    DirectoryTimes,
    /// Every change of attributes changes the inode's time.
    ChangeTime,
    /// Another name changes it, too.
    LinkTime,
    /// Attributes and lengths of append-only files stay.
    AppendOnly,
    /// A setgid directory hands its group down.
    GroupOfParent,
    /// An extended attribute that must be new is.
    NewXattr,
    /// Times that cannot be said become the nearest that can.
    ClampedTimes,
    /// A file without a name can get one.
    LinkTmpfile,
    /// A change is in the log before its answer is given.
    LogFirst,
    /// Changes that only the log has are made again.
    Repeats,
    /// Each with the inode that it had.
    SameInode,
    /// Answers that were not given are kept for when they are asked for again.
    PendingReplies,
    /// What has no name stays for those who have it open.
    KeepOpenOrphans,
    /// What has no name is noted for the next worker.
    RecordOrphans,
    /// The kernel is asked to send again what a worker had in hand, as it can since Linux 6.9.
    Resend,
    /// A worker lives on that is asked for the name [`CRASHING_NAME`].
    SurviveCrashingName,
}

/// See [`InjectedFault::SurviveCrashingName`].
pub const CRASHING_NAME: &[u8] = b"deadly";

impl InjectedFault {
    /// Those that show when a worker dies.
    pub const VISIBLE_ON_RESTART: [Self; 6] = [
        Self::LogFirst,
        Self::Repeats,
        Self::SameInode,
        Self::PendingReplies,
        Self::KeepOpenOrphans,
        Self::RecordOrphans,
    ];

    /// Those that show in single calls.
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

    /// Whether it is left out.
    #[cfg(not(feature = "omissions"))]
    #[inline]
    pub const fn is_made(self) -> bool {
        false
    }

    /// Whether it is left out.
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

/// The variable of the environment that names where a worker lingers.
pub const DELAY_VARIABLE: &str = "DRACONIS_LINGER";

/// Where a worker lingers over each request, so that one that is killed dies there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DelayPoint {
    /// A request was read.
    Read,
    /// What it changes is changed, in memory.
    Applied,
    /// The log has it.
    Logged,
    /// It was answered.
    Answered,
    /// The disk has taken a batch of changes.
    Committed,
}

impl DelayPoint {
    /// All of them, in the order in which a request passes them.
    pub const ALL: [Self; 5] =
        [Self::Read, Self::Applied, Self::Logged, Self::Answered, Self::Committed];

    /// Lingers here, if it is to.
    #[cfg(not(feature = "omissions"))]
    #[inline]
    pub const fn pass(self) {}

    /// Lingers here, if it is to.
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

/// What a worker's environment needs to leave out, and to linger at, the same.
pub fn environment() -> impl Iterator<Item = (&'static str, String)> {
    let names =
        if cfg!(feature = "omissions") { &[FAULTS_VARIABLE, DELAY_VARIABLE][..] } else { &[] };
    names.iter().filter_map(|name| Some((*name, std::env::var(name).ok()?)))
}
