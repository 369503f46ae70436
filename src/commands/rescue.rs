//! `draconis rescue`: copies everything that can be read of a damaged volume to a directory.
//!
//! ```text
//!   image ─▶ map of bad sectors ─▶ confined ─▶ files found ─▶ those that are there already left out
//!        ─▶ reader thread ══ pieces ══▶ files in DIR
//!                └─ a line of the list for each file that is not whole, before it is complete
//! ```
//! Law: a file with its size and time of modification in DIR was completed by an earlier run; its
//! line is in the list by then.

mod list;
mod sectors;

use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, ensure};
use clap::Args;
use draconis_access::walk::{FileChunk, chunk_queue};
use draconis_device::Disk;
use draconis_device::sector_map::{MapOf, MappedDisk, SectorMap};
use draconis_ext::OpenOptions;
use draconis_ext::rescue::{Loss, Rescue};
use draconis_service::path_members;
use draconis_service::sandbox::{self, SandboxProfile, open_beneath};
use draconis_service::volume;
use draconis_types::path_bytes::ShowPath;
use draconis_types::{Attributes, FileType};
use rustix::io::Errno;
use serde::Serialize;

use self::list::LossList;
use self::sectors::SectorMapFile;
use super::undelete::implied_directory;
use crate::extract::{
    ExtractionDest, ExtractionItem, ExtractionSource, TreeExtraction, XattrPairs,
};
use crate::image::{self, BackingFiles, SuperblockArgs, UnreadFile, VolumeArgs};
use crate::progress::{ByteProgress, CheckProgress, ProgressMode};
use crate::report;
use crate::text::pluralize;

const RESCUE_HELP: &str = "\
Bytes that cannot be read are zeros in the copy. The list names what is missing or may be wrong,
one JSON object per line: path, inode, problem, lost (nothing of it was copied), missing (ranges:
[first byte, byte after the last]).";

/// Copy everything that can be read of a damaged volume to a directory.
///
/// Goes on over damage and read errors. A damaged superblock or group descriptor is replaced by a
/// backup; files without a name go to lost+found. IMAGE does not change. The same command again
/// continues an interrupted copy: complete files are not read again.
#[derive(Debug, Args)]
#[command(after_long_help = RESCUE_HELP)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: VolumeArgs,
    /// Which superblock to use.
    #[command(flatten)]
    superblock: SuperblockArgs,
    /// Map of GNU ddrescue. If IMAGE is a file, its map: what is not finished is missing. If IMAGE
    /// is a device, bad sectors are not read again, and what is read or fails enters the map.
    #[arg(long, value_name = "FILE")]
    map: Option<PathBuf>,
    /// List of what is missing (default: DIR/draconis-rescue.jsonl).
    #[arg(long, value_name = "FILE")]
    list: Option<PathBuf>,
    /// Print the summary as JSON.
    #[arg(long)]
    json: bool,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Image: file, block device or STORE#NAME.
    image: PathBuf,
    /// Directory to copy to; it is made if it does not exist.
    #[arg(value_name = "DIR")]
    dest: PathBuf,
}

/// What was copied.
#[derive(Serialize)]
struct Summary {
    /// Files, links and directories in the volume, as far as they were found.
    found: usize,
    /// Files that an earlier run completed.
    there_already: usize,
    /// Files of which bytes are missing.
    incomplete: u64,
    /// Bytes that are missing of them.
    missing_bytes: u64,
    /// Names of which nothing was copied.
    lost: u64,
    /// Files and directories without a name, in lost+found.
    unnamed: u64,
    /// Other lines of the list: what may be wrong.
    doubtful: u64,
    /// True if the destination could not take everything.
    failed_to_write: bool,
    #[serde(flatten, with = "path_members::list")]
    list: PathBuf,
}

/// Name of the list in DIR.
const LIST_NAME: &str = "draconis-rescue.jsonl";

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { image, dest, .. } = arguments;
    if !dest.exists() {
        std::fs::create_dir(dest).with_context(|| dest.shown().to_string())?;
    }
    ensure!(dest.is_dir(), "{}: not a directory", dest.shown());
    let sources = image::sources_to_protect(image, &arguments.place);
    let list_path = arguments.list.clone().unwrap_or_else(|| dest.join(LIST_NAME));
    let list_file = list::open(&sources, &list_path)?;
    let map = arguments.map.as_deref();
    let map = map.map(|path| SectorMapFile::open(&sources, path, image)).transpose()?;
    let beneath = open_beneath(dest).with_context(|| dest.shown().to_string())?;
    let dest = ExtractionDest::open(dest.clone(), vec![], sources)?;
    let (disk, map) = open_disk(arguments, beneath.as_fd(), map)?;
    let bar = CheckProgress::new(arguments.progress);
    let scan = |done, total| bar.show(done, total);
    let place = arguments.superblock.place();
    let checked = match place.block {
        Some(_) => Ok(()),
        None => volume::refuse_other_contents(&*disk),
    };
    let rescue = checked.and_then(|()| {
        let options = OpenOptions::default();
        Rescue::scan(disk.clone(), options, &place, &scan).map_err(Into::into)
    });
    let rescue = rescue.map_err(|error| image::open_volume_error(image, &*disk, error))?;
    drop(bar);
    let list = LossList::start(list_file, &list_path, &rescue)?;
    let source = RescueSource { rescue: &rescue, list: &list, implied: implied_directory() };
    let (order, there_already) = left_to_copy(&source, &dest, &list);
    let failed = std::thread::scope(|scope| {
        let (send, pieces) = chunk_queue();
        let (source, order, map) = (&source, &order, map.as_ref());
        scope.spawn(move || source.read_all(order, send, map));
        let bytes = order.iter().filter_map(|at| rescue.items()[*at].attributes.as_ref());
        let bytes = bytes.map(|it| it.size_bytes.min(it.blocks_512.saturating_mul(512))).sum();
        let progress = ByteProgress::new(arguments.progress, bytes);
        let mut copy = TreeExtraction::new(source, dest, pieces, progress);
        copy.copy_all(order);
        copy.failed
    });
    if let Some(map) = &map {
        map.save()?;
    }
    let counts = list.finish()?;
    let summary = Summary {
        found: rescue.items().iter().filter(|item| item.attributes.is_some()).count(),
        there_already,
        incomplete: counts.incomplete,
        missing_bytes: counts.missing_bytes,
        lost: counts.lost,
        unnamed: counts.unnamed,
        doubtful: counts.doubtful,
        failed_to_write: failed,
        list: list_path,
    };
    print(arguments, &summary)?;
    let is_whole = !failed && counts.lines == 0;
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Opens the disk of the image, confines this process, and puts the map over the disk.
fn open_disk(
    arguments: &Arguments,
    beneath: std::os::fd::BorrowedFd<'_>,
    map: Option<SectorMapFile>,
) -> anyhow::Result<(Arc<dyn Disk>, Option<SectorMapFile>)> {
    let Arguments { image, place, .. } = arguments;
    if image::parse_store_disk(image)?.is_some() {
        ensure!(map.is_none(), "--map is for a file or a device; a store checks its disks itself");
        return Ok((image::open_disk_confined(image, place, Some(beneath))?, None));
    }
    let is_device = std::fs::metadata(image).is_ok_and(|it| it.file_type().is_block_device());
    let file = UnreadFile::open(image)?;
    let behind = BackingFiles::open(image, &place.backing)?;
    sandbox::confine(&SandboxProfile::Extractor { beneath }, None)?;
    let whole = if is_device { file.start_direct(image)? } else { file.start(image)? };
    // Without a file, too: what failed is not read again.
    let mut map = map;
    let whole: Arc<dyn Disk> = match &mut map {
        Some(map) => map.cover(whole)?,
        None => Arc::new(MappedDisk::new(whole, SectorMap::default(), MapOf::Disk)),
    };
    let part = volume::locate_volume(whole, &behind.start_disks(), &place.options());
    let part = part.with_context(|| image.shown().to_string())?;
    Ok((part.disk, map))
}

/// Returns the items that are not in DIR yet, in their order, and the number of complete files.
fn left_to_copy(
    source: &RescueSource<'_>,
    dest: &ExtractionDest,
    list: &LossList,
) -> (Vec<usize>, usize) {
    let is_there = |at: &usize| {
        let item = source.item(*at);
        let is_file = item.attributes.kind == FileType::File && item.link_to.is_none();
        is_file && dest.has_complete_file(item)
    };
    let order = source.rescue.order().iter().copied();
    let (there, left): (Vec<usize>, Vec<usize>) = order.partition(is_there);
    list.keep_lines_of(there.iter().map(|at| &source.rescue.items()[*at].path[..]));
    (left, there.len())
}

struct RescueSource<'a> {
    rescue: &'a Rescue,
    list: &'a LossList,
    implied: Attributes,
}

impl RescueSource<'_> {
    /// Reads the contents of files in order and sends them; ends early if the receiver is gone.
    fn read_all(
        &self,
        order: &[usize],
        mut pieces: draconis_access::walk::ChunkSender,
        map: Option<&SectorMapFile>,
    ) {
        for at in order {
            let item = &self.rescue.items()[*at];
            let kind = item.attributes.as_ref().map(|it| it.kind);
            if kind != Some(FileType::File) || item.link_to.is_some() {
                continue;
            }
            let mut is_heard = true;
            let contents = self.rescue.read(item, &mut |offset, data| {
                is_heard = pieces.send(FileChunk::Data(offset, data));
                is_heard
            });
            if !is_heard {
                return;
            }
            if !contents.missing.is_empty() || contents.reason.is_some() {
                let what = contents.reason.unwrap_or_else(|| "contents are missing".to_owned());
                self.list.add(&Loss {
                    path: item.path.clone(),
                    inode: item.inode(),
                    what,
                    missing: contents.missing,
                    is_lost: false,
                });
            }
            if !pieces.send(FileChunk::End(Ok(()))) {
                return;
            }
            map.map(SectorMapFile::save_if_due);
        }
        pieces.flush();
    }

    fn lose(&self, at: usize, what: String, is_lost: bool) {
        let item = &self.rescue.items()[at];
        let (path, inode) = (item.path.clone(), item.inode());
        self.list.add(&Loss { path, inode, what, missing: vec![], is_lost });
    }
}

impl ExtractionSource for RescueSource<'_> {
    fn count(&self) -> usize {
        self.rescue.items().len()
    }

    fn item(&self, at: usize) -> ExtractionItem<'_> {
        let item = &self.rescue.items()[at];
        let attributes = item.attributes.as_ref().unwrap_or(&self.implied);
        let is_implied = item.attributes.is_none();
        ExtractionItem { at, path: &item.path, attributes, link_to: item.link_to, is_implied }
    }

    fn read_link(&self, at: usize) -> Result<Vec<u8>, Errno> {
        self.rescue.link_target(&self.rescue.items()[at]).map_err(|error| {
            self.lose(at, format!("symbolic link: {error}"), true);
            Errno::UCLEAN
        })
    }

    fn xattrs(&self, at: usize) -> Result<XattrPairs, Errno> {
        let (found, error) = self.rescue.xattrs(&self.rescue.items()[at]);
        if let Some(error) = error {
            self.lose(at, format!("extended attributes are missing: {error}"), false);
        }
        Ok(found)
    }
}

fn print(arguments: &Arguments, summary: &Summary) -> anyhow::Result<()> {
    if arguments.json {
        report::print_line(serde_json::to_string_pretty(summary)?)?;
        return Ok(());
    }
    let files =
        pluralize(summary.found as u64, "file, link or directory", "files, links and directories");
    report::print_line(format_args!("{}: {files}", arguments.image.shown()))?;
    let lines = [
        (summary.there_already as u64, "were there already".to_owned()),
        (summary.unnamed, "have no name: they are in lost+found".to_owned()),
        (
            summary.incomplete,
            format!("are incomplete: {} bytes are zeros in the copy", summary.missing_bytes),
        ),
        (summary.lost, "could not be copied".to_owned()),
        (summary.doubtful, "may be wrong, or have lost names or attributes".to_owned()),
    ];
    for (count, text) in lines.iter().filter(|(count, _)| *count > 0) {
        report::print_line(format_args!("{count:>9} {text}"))?;
    }
    if summary.incomplete + summary.lost + summary.unnamed + summary.doubtful > 0 {
        report::print_line(format_args!("which: {}", summary.list.shown()))?;
    }
    Ok(())
}
