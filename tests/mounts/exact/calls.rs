//! Table of calls. Each makes a few system calls on the names of a case and records the results.
//! Dimensions of a call (flags, modes, offsets) are part of its name.

mod descriptors;
mod names;
mod opens;
mod paths;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use crate::exact::look::{self, ObservedFile, ResultFields, format_bytes, format_result};
use crate::exact::sys::{self, SyscallResult};
use crate::exact::who::TestUser;

/// Group of a call, which decides the cases that it is combined with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CallGroup {
    /// Opens the target, and reads and writes.
    Open,
    /// Works on a descriptor of the target.
    Descriptor,
    /// Works on the target of a path.
    Path,
    /// Creates, moves or removes names.
    Name,
    /// Executes the target.
    Run,
}

pub struct SystemCallTest {
    pub name: String,
    pub group: CallGroup,
    /// True if root opens the descriptors and passes them to the user.
    pub given: bool,
    pub run: Box<dyn Fn(&mut CallContext) + Send + Sync>,
}

/// Returns all calls.
pub fn all_calls() -> &'static [SystemCallTest] {
    static CALLS: std::sync::OnceLock<Vec<SystemCallTest>> = std::sync::OnceLock::new();
    CALLS.get_or_init(|| {
        let mut table = CallTable(vec![]);
        opens::add_open_calls(&mut table);
        descriptors::add_descriptor_calls(&mut table);
        paths::add_path_calls(&mut table);
        names::add_name_calls(&mut table);
        table.0
    })
}

struct CallTable(Vec<SystemCallTest>);

impl CallTable {
    fn add_call(
        &mut self,
        group: CallGroup,
        name: impl Into<String>,
        run: impl Fn(&mut CallContext) + Send + Sync + 'static,
    ) {
        self.0.push(SystemCallTest { name: name.into(), group, given: false, run: Box::new(run) });
    }

    /// Adds a call on a descriptor opened by the user, and on one opened by root.
    fn add_descriptor_call(
        &mut self,
        name: impl Into<String>,
        flags: i32,
        run: impl Fn(&mut CallContext, &OwnedFd) + Send + Sync + Clone + 'static,
    ) {
        let name = name.into();
        for given in [false, true] {
            let run = run.clone();
            let run = move |acts: &mut CallContext| {
                let Some(fd) = acts.target_descriptor(flags, given) else { return };
                run(acts, &fd);
                acts.held.push(fd);
            };
            let name = if given { format!("{name}, given") } else { name.clone() };
            let group = CallGroup::Descriptor;
            self.0.push(SystemCallTest { name, group, given, run: Box::new(run) });
        }
    }
}

/// A call in progress: its paths, user and results.
pub struct CallContext<'a> {
    pub who: TestUser,
    pub t: PathBuf,
    pub o: PathBuf,
    pub d: PathBuf,
    pub n: PathBuf,
    /// True if passed descriptors refer to an orphan.
    pub unlinked: bool,
    pub answers: ResultFields,
    pub held: Vec<OwnedFd>,
    pub top: &'a Path,
}

impl<'a> CallContext<'a> {
    pub fn new(dir: &Path, top: &'a Path, who: TestUser) -> Self {
        let [t, o, d, n] = ["t", "o", "d", "n"].map(|name| dir.join(name));
        Self { who, t, o, d, n, unlinked: false, answers: vec![], held: vec![], top }
    }

    /// Records a result; the step number distinguishes equal names.
    fn record_answer(&mut self, step: &str, answer: String) {
        let number = self.answers.len();
        self.answers.push((format!("answer {number:02} {step}"), answer));
    }

    /// Makes a call as the user, and records its result.
    fn run_call(&mut self, step: &str, call: impl FnOnce() -> SyscallResult) -> SyscallResult {
        let answer = self.who.run_as_user(call);
        self.record_answer(step, format_result(&answer, i64::to_string));
        answer
    }

    /// Makes a call that returns a descriptor, whose number is not recorded.
    fn open(&mut self, step: &str, open: impl FnOnce() -> Result<OwnedFd, i32>) -> Option<OwnedFd> {
        let answer = self.who.run_as_user(open);
        self.record_answer(step, format_result(&answer, |_| "open".into()));
        answer.ok()
    }

    /// Makes a call that returns bytes.
    fn run_call_returning_bytes(
        &mut self,
        step: &str,
        call: impl FnOnce() -> Result<Vec<u8>, i32>,
    ) {
        let answer = self.who.run_as_user(call);
        self.record_answer(step, format_result(&answer, |bytes| format_bytes(bytes)));
    }

    fn target_descriptor(&mut self, flags: i32, given: bool) -> Option<OwnedFd> {
        // Must not block on a FIFO, nor follow a symbolic link.
        let flags = flags | libc::O_NONBLOCK;
        if !given {
            let t = self.t.clone();
            return self.open("open", || sys::open(&t, flags, 0));
        }
        let opened = sys::open(&self.t, flags, 0);
        self.record_answer("open by root", format_result(&opened, |_| "open".into()));
        if self.unlinked && opened.is_ok() {
            let removed = sys::unlink(&self.t, 0);
            self.record_answer("unlink by root", format_result(&removed, i64::to_string));
        }
        opened.ok()
    }

    /// Returns the properties of the files behind open descriptors.
    pub fn stat_held_descriptors(&self) -> Vec<ObservedFile> {
        let seen = self.held.iter().enumerate().filter_map(|(i, fd)| {
            Some(look::from_statx(&format!("descriptor {i}"), &sys::fstat(fd).ok()?))
        });
        seen.collect()
    }
}
