//! A process that had files open, mapped, listed and cached before another process changed them.
//!
//! It is this program, started for a single test that reads commands from standard input.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use serde::{Deserialize, Serialize};

use crate::exact::look::{self, ObservedFile, ResultFields, format_bytes, format_result};
use crate::exact::sys::{self, MemoryMapping};

const OBSERVER_CHILD_ENV: &str = "DRACONIS_EXACT_OBSERVER";

#[derive(Serialize, Deserialize)]
enum ObserverRequest {
    Watch(usize, PathBuf),
    Look(usize),
    Forget(usize),
}

/// What the observer sees: attributes before reading, and then contents.
#[derive(Serialize, Deserialize, Default)]
pub struct ObserverView {
    pub seen: Vec<ObservedFile>,
    pub contents: ResultFields,
}

pub struct ObserverProcess {
    child: Child,
    to: UnixStream,
    from: BufReader<UnixStream>,
}

impl ObserverProcess {
    pub fn start() -> Self {
        let (to, theirs) = UnixStream::pair().unwrap();
        let child = draconis_testkit::child_test!(child)
            .env(OBSERVER_CHILD_ENV, "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let from = BufReader::new(to.try_clone().unwrap());
        Self { child, to, from }
    }

    /// Opens a file, and reads, maps or lists it.
    pub fn watch_file(&mut self, id: usize, path: &Path) {
        self.send_request(&ObserverRequest::Watch(id, path.to_path_buf()));
    }

    /// Returns the observer's current view of a watched file.
    pub fn view_file(&mut self, id: usize) -> ObserverView {
        self.send_request(&ObserverRequest::Look(id))
    }

    pub fn forget_file(&mut self, id: usize) {
        self.send_request(&ObserverRequest::Forget(id));
    }

    fn send_request(&mut self, ask: &ObserverRequest) -> ObserverView {
        let mut line = serde_json::to_vec(ask).unwrap();
        line.push(b'\n');
        self.to.write_all(&line).unwrap();
        let mut answer = String::new();
        self.from.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).expect("the observer answers")
    }
}

impl Drop for ObserverProcess {
    fn drop(&mut self) {
        let _ = self.to.shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// Descriptors that the child holds for a file.
struct WatchedFile {
    path: PathBuf,
    /// The file itself, of any type.
    file: Option<OwnedFd>,
    /// An open regular file or directory.
    open: Option<OwnedFd>,
    mapping: Option<MemoryMapping>,
}

const PAGE_BYTES: usize = 4096;

impl WatchedFile {
    fn new(path: PathBuf) -> Self {
        let file = sys::open(&path, libc::O_PATH | libc::O_NOFOLLOW, 0).ok();
        let kind =
            file.as_ref().and_then(|file| Some(look::file_type_bits(&sys::fstat(file).ok()?)));
        let can_open = matches!(kind, Some(libc::S_IFREG | libc::S_IFDIR));
        let how = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let open = if can_open { sys::open(&path, how, 0).ok() } else { None };
        let is_file = kind == Some(libc::S_IFREG);
        let mapping = open.as_ref().filter(|_| is_file);
        let mapping = mapping.and_then(|open| MemoryMapping::new(open, PAGE_BYTES, false).ok());
        Self { path, file, open, mapping }
    }

    fn view_file(&self) -> ObserverView {
        let mut view = ObserverView::default();
        if let Some(Ok(found)) = self.file.as_ref().map(sys::fstat) {
            view.seen.push(look::from_statx("held", &found));
        }
        match sys::lstat(&self.path) {
            Ok(found) => view.seen.push(look::from_statx("named", &found)),
            Err(errno) => view.contents.push(("named".into(), sys::errno_name(errno))),
        }
        let Some(open) = &self.open else { return view };
        let Ok(found) = sys::fstat(open) else { return view };
        let mut tell = |key: &str, value| view.contents.push((key.into(), value));
        if look::file_type_bits(&found) == libc::S_IFDIR {
            tell("names", format_result(&sys::list_names(open), |names| names.join(" ")));
            return view;
        }
        if let Some(mapping) = &self.mapping {
            let len = PAGE_BYTES.min(found.stx_size as usize);
            tell("mapped", format_result(&mapping.read_bytes(len), |bytes| format_bytes(bytes)));
        }
        tell("buffered", format_result(&look::read_all(open), |bytes| format_bytes(bytes)));
        view
    }
}

/// Not a test: the child that [`ObserverProcess`] starts.
#[test]
fn child() {
    if std::env::var_os(OBSERVER_CHILD_ENV).is_none() {
        return;
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut answers = UnixStream::from(socket);
    let mut watched = HashMap::new();
    for line in BufReader::new(answers.try_clone().unwrap()).lines() {
        let Ok(line) = line else { return };
        let view = match serde_json::from_str(&line).unwrap() {
            ObserverRequest::Watch(id, path) => {
                let one = WatchedFile::new(path);
                one.view_file();
                watched.insert(id, one);
                ObserverView::default()
            }
            ObserverRequest::Look(id) => {
                watched.get(&id).map(WatchedFile::view_file).unwrap_or_default()
            }
            ObserverRequest::Forget(id) => {
                watched.remove(&id);
                ObserverView::default()
            }
        };
        let mut answer = serde_json::to_vec(&view).unwrap();
        answer.push(b'\n');
        if answers.write_all(&answer).is_err() {
            return;
        }
    }
}
