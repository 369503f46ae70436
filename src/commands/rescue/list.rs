//! List of what is missing: a JSON object per line, and the memory of interrupted runs.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use draconis_access::destination::ReadSources;
use draconis_ext::rescue::{Loss, Rescue};
use draconis_types::lock::Mutex;
use draconis_types::path_bytes::{ShowPath, hex_if_not_utf8};
use serde::{Deserialize, Serialize};

use crate::report;
use crate::text::escape_control_chars;

/// Longest list that is read again.
const MAX_LIST_BYTES: u64 = 1 << 30;

/// First line: whose files are in DIR.
#[derive(Serialize, Deserialize, PartialEq, Eq)]
struct Header {
    /// UUID of the volume, in hexadecimal digits.
    volume: String,
}

#[derive(Serialize, Deserialize)]
struct Line {
    path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    inode: Option<u32>,
    problem: String,
    lost: bool,
    missing: Vec<(u64, u64)>,
}

/// Numbers of the lines.
#[derive(Clone, Copy, Default)]
pub struct LossCounts {
    pub lines: u64,
    pub incomplete: u64,
    pub missing_bytes: u64,
    pub lost: u64,
    pub unnamed: u64,
    pub doubtful: u64,
}

struct State {
    file: File,
    at: u64,
    counts: LossCounts,
    /// Lines of an earlier run, by path.
    earlier: HashMap<String, Vec<Line>>,
    /// Lines of this run.
    written: HashSet<String>,
    failed: Option<std::io::Error>,
}

/// The list while it grows.
pub struct LossList {
    path: PathBuf,
    state: Mutex<State>,
}

/// Opens the list, before this process is confined; what is in it stays.
pub fn open(sources: &ReadSources, path: &Path) -> anyhow::Result<File> {
    sources.open_or_create(path)
}

impl LossList {
    /// Begins the list anew, with what was found before any contents were read.
    pub fn start(file: File, path: &Path, rescue: &Rescue) -> anyhow::Result<Self> {
        let shown = || path.shown().to_string();
        let len = file.metadata().with_context(shown)?.len().min(MAX_LIST_BYTES);
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, 0).with_context(shown)?;
        let uuid = rescue.volume().info().uuid;
        let header = Header { volume: uuid.iter().map(|byte| format!("{byte:02x}")).collect() };
        let mut lines = bytes.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        let mut earlier: HashMap<String, Vec<Line>> = HashMap::new();
        if let Some(first) = lines.next() {
            match serde_json::from_slice::<Header>(first) {
                Ok(found) if found == header => {}
                Ok(_) => bail!("{}: the list of another volume; name another directory", shown()),
                Err(_) => bail!("{}: not a list of draconis rescue", shown()),
            }
            // The last line of an interrupted run may be torn.
            for line in lines.filter_map(|line| serde_json::from_slice::<Line>(line).ok()) {
                earlier.entry(line.path.clone()).or_default().push(line);
            }
        }
        let first = format!("{}\n", serde_json::to_string(&header)?);
        file.write_all_at(first.as_bytes(), 0).with_context(shown)?;
        file.set_len(first.len() as u64).with_context(shown)?;
        let at = first.len() as u64;
        let (counts, written) = (LossCounts::default(), HashSet::new());
        let state = State { file, at, counts, earlier, written, failed: None };
        let list = Self { path: path.to_owned(), state: Mutex::new(state) };
        rescue.losses().iter().for_each(|loss| list.add(loss));
        Ok(list)
    }

    /// Adds a line.
    pub fn add(&self, loss: &Loss) {
        self.write(&Line {
            path: shown_path(&loss.path),
            path_hex: hex_if_not_utf8(&loss.path),
            inode: loss.inode.map(|inode| inode.0),
            problem: loss.what.clone(),
            lost: loss.is_lost,
            missing: loss.missing.iter().map(|range| (range.start, range.end)).collect(),
        });
    }

    /// Keeps the lines that an earlier run wrote for the contents of these files.
    pub fn keep_lines_of<'a>(&self, paths: impl Iterator<Item = &'a [u8]>) {
        let earlier = std::mem::take(&mut self.state.lock().earlier);
        if earlier.is_empty() {
            return;
        }
        for path in paths {
            let lines = earlier.get(&shown_path(path)).into_iter().flatten();
            lines.for_each(|line| self.write(line));
        }
    }

    fn write(&self, line: &Line) {
        let Ok(mut text) = serde_json::to_string(line) else { return };
        text.push('\n');
        let mut state = self.state.lock();
        // What an earlier run found too.
        if !state.written.insert(text.clone()) {
            return;
        }
        let counts = &mut state.counts;
        counts.lines += 1;
        match () {
            () if line.lost => counts.lost += 1,
            () if !line.missing.is_empty() => {
                counts.incomplete += 1;
                counts.missing_bytes +=
                    line.missing.iter().map(|(from, to)| to - from).sum::<u64>();
            }
            () if line.problem == draconis_ext::rescue::UNNAMED => counts.unnamed += 1,
            () => counts.doubtful += 1,
        }
        let at = state.at;
        match state.file.write_all_at(text.as_bytes(), at) {
            Ok(()) => state.at += text.len() as u64,
            Err(error) => {
                if state.failed.is_none() {
                    let shown = self.path.shown();
                    report::warn_line(format_args!("draconis: {shown}: {error}"));
                }
                state.failed.get_or_insert(error);
            }
        }
    }

    /// Returns the counts; all lines are durable then.
    pub fn finish(&self) -> anyhow::Result<LossCounts> {
        let mut state = self.state.lock();
        let shown = || self.path.shown().to_string();
        if let Some(error) = state.failed.take() {
            return Err(error).with_context(shown);
        }
        state.file.sync_data().with_context(shown)?;
        Ok(state.counts)
    }
}

fn shown_path(path: &[u8]) -> String {
    format!("/{}", escape_control_chars(path))
}
