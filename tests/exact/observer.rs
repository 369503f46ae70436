//! A process that had files open, mapped, listed and cached before another process changed them.
//!
//! It is this program, started for a single test that reads commands from standard input.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde::{Deserialize, Serialize};

use crate::look::{self, Fields, Seen, said, short};
use crate::sys::{self, Mapping};

const CHILD: &str = "DRACONIS_EXACT_OBSERVER";

#[derive(Serialize, Deserialize)]
enum Ask {
    Watch(usize, PathBuf),
    Look(usize),
    Forget(usize),
}

/// What the observer sees: attributes before reading, and then contents.
#[derive(Serialize, Deserialize, Default)]
pub struct View {
    pub seen: Vec<Seen>,
    pub contents: Fields,
}

pub struct Observer {
    child: Child,
    to: UnixStream,
    from: BufReader<UnixStream>,
}

impl Observer {
    pub fn start() -> Self {
        let (to, theirs) = UnixStream::pair().unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "observer::child", "--nocapture"])
            .env(CHILD, "1")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let from = BufReader::new(to.try_clone().unwrap());
        Self { child, to, from }
    }

    /// Opens a file, and reads, maps or lists it.
    pub fn watch(&mut self, id: usize, path: &Path) {
        self.ask(&Ask::Watch(id, path.to_path_buf()));
    }

    /// Returns the observer's current view of a watched file.
    pub fn look(&mut self, id: usize) -> View {
        self.ask(&Ask::Look(id))
    }

    pub fn forget(&mut self, id: usize) {
        self.ask(&Ask::Forget(id));
    }

    fn ask(&mut self, ask: &Ask) -> View {
        let mut line = serde_json::to_vec(ask).unwrap();
        line.push(b'\n');
        self.to.write_all(&line).unwrap();
        let mut answer = String::new();
        self.from.read_line(&mut answer).unwrap();
        serde_json::from_str(&answer).expect("the observer answers")
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        let _ = self.to.shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// Descriptors that the child holds for a file.
struct Watched {
    path: PathBuf,
    /// The file itself, of any type.
    file: Option<OwnedFd>,
    /// An open regular file or directory.
    open: Option<OwnedFd>,
    mapping: Option<Mapping>,
}

const PAGE: usize = 4096;

impl Watched {
    fn new(path: PathBuf) -> Self {
        let file = sys::open(&path, libc::O_PATH | libc::O_NOFOLLOW, 0).ok();
        let kind = file.as_ref().and_then(|file| Some(look::kind(&sys::fstat(file).ok()?)));
        let can_open = matches!(kind, Some(libc::S_IFREG | libc::S_IFDIR));
        let how = libc::O_RDONLY | libc::O_NOFOLLOW | libc::O_NONBLOCK;
        let open = if can_open { sys::open(&path, how, 0).ok() } else { None };
        let is_file = kind == Some(libc::S_IFREG);
        let mapping = open.as_ref().filter(|_| is_file);
        let mapping = mapping.and_then(|open| Mapping::new(open, PAGE, false).ok());
        Self { path, file, open, mapping }
    }

    fn look(&self) -> View {
        let mut view = View::default();
        if let Some(Ok(found)) = self.file.as_ref().map(sys::fstat) {
            view.seen.push(look::of("held", &found));
        }
        match sys::lstat(&self.path) {
            Ok(found) => view.seen.push(look::of("named", &found)),
            Err(errno) => view.contents.push(("named".into(), sys::errno_name(errno))),
        }
        let Some(open) = &self.open else { return view };
        let Ok(found) = sys::fstat(open) else { return view };
        let mut tell = |key: &str, value| view.contents.push((key.into(), value));
        if look::kind(&found) == libc::S_IFDIR {
            tell("names", said(&sys::names(open), |names| names.join(" ")));
            return view;
        }
        if let Some(mapping) = &self.mapping {
            let len = PAGE.min(found.stx_size as usize);
            tell("mapped", said(&mapping.bytes(len), |bytes| short(bytes)));
        }
        tell("buffered", said(&look::read_all(open), |bytes| short(bytes)));
        view
    }
}

/// Not a test: the child that [`Observer`] starts.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let mut answers = UnixStream::from(socket);
    let mut watched = HashMap::new();
    for line in BufReader::new(answers.try_clone().unwrap()).lines() {
        let Ok(line) = line else { return };
        let view = match serde_json::from_str(&line).unwrap() {
            Ask::Watch(id, path) => {
                let one = Watched::new(path);
                one.look();
                watched.insert(id, one);
                View::default()
            }
            Ask::Look(id) => watched.get(&id).map(Watched::look).unwrap_or_default(),
            Ask::Forget(id) => {
                watched.remove(&id);
                View::default()
            }
        };
        let mut answer = serde_json::to_vec(&view).unwrap();
        answer.push(b'\n');
        if answers.write_all(&answer).is_err() {
            return;
        }
    }
}
