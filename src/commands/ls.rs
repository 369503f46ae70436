//! `draconis ls`

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use draconis_ext::{Follow, InodeNumber, Volume};
use draconis_types::path_bytes::{ShowPath, escape_non_utf8, hex_if_not_utf8};
use draconis_types::{Attributes, FileType};
use serde::Serialize;

use crate::edit::{single_image, with_context};
use crate::image::{self, ReadArgs, resolve_target};
use crate::report;
use crate::target::{ImagePath, join_path};
use crate::text::{self, EscapingOutput, TimeFormatter, escape_control_chars};

const LS_JSON_HELP: &str = "\
With --json each name is an object, one a line, in the order of the listing:
  path, name           the whole path in the volume, and the last part of it
  inode, kind, mode    the kind as stat has it, the mode in octal
  links, uid, gid, size
  device               [major, minor] of devices, else null
  link_target          of symbolic links, else null
  modified             [seconds, nanoseconds] since 1970
Bytes that are not UTF-8 are \\xNN in path, name and link_target, and then the member path_hex,
name_hex or link_target_hex has all bytes. What cannot be read has a member error instead of
what would follow inode.";

/// List directory contents of a volume.
#[derive(Debug, Args)]
#[command(after_long_help = LS_JSON_HELP, disable_help_flag = true)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: ReadArgs,
    /// Show mode, links, owner, group, size and time of each name.
    #[arg(short)]
    long: bool,
    /// With -l, show sizes as 1.5K, 23M or 2.1G.
    #[arg(short = 'h')]
    human: bool,
    /// Show help.
    #[arg(long, action = clap::ArgAction::HelpLong)]
    help: Option<bool>,
    /// Include names that start with a dot.
    #[arg(short)]
    all: bool,
    /// List subdirectories recursively.
    #[arg(short = 'R')]
    recursive: bool,
    /// List directories and symbolic links themselves, not their contents or targets.
    #[arg(short, conflicts_with = "recursive")]
    directory: bool,
    /// Print JSON: a list with an object for each name.
    #[arg(long)]
    json: bool,
    /// Directories and files to list (default: the root directory).
    #[arg(value_name = "IMAGE[:/path]", required = true)]
    targets: Vec<ImagePath>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let clock = TimeFormatter::new();
    let tree = image::open(single_image(&arguments.targets)?, &arguments.place, None)?;
    let volume = tree.volume();
    let mut list = LsListing {
        volume,
        arguments,
        clock,
        out: EscapingOutput::new(),
        has_headings: arguments.recursive || arguments.targets.len() > 1,
        first: true,
        failed: false,
    };
    if arguments.json {
        write!(list.out, "[")?;
    }
    list.list_targets()?;
    if arguments.json {
        writeln!(list.out, "{}]", if list.first { "" } else { "\n" })?;
    }
    list.out.flush()?;
    Ok(if list.failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

struct LsListing<'a> {
    volume: &'a Volume,
    arguments: &'a Arguments,
    clock: TimeFormatter,
    out: EscapingOutput,
    /// True if directories are printed with a heading.
    has_headings: bool,
    /// True until the first output.
    first: bool,
    failed: bool,
}

impl LsListing<'_> {
    /// Lists files first and then the contents of directories, as `ls` does.
    fn list_targets(&mut self) -> anyhow::Result<()> {
        let follow = if self.arguments.directory { Follow::No } else { Follow::Yes };
        let mut dirs = vec![];
        for target in &self.arguments.targets {
            let found = resolve_target(self.volume, target, follow);
            let kind = found.and_then(|found| match self.volume.inode(found) {
                Ok(inode) => Ok((found, inode.kind)),
                Err(error) => Err(with_context(target, error)),
            });
            match kind {
                Ok((found, FileType::Directory)) if !self.arguments.directory => {
                    dirs.push((found, &target.path));
                }
                Ok((found, _)) => self.print_entry(&target.path, &target.path, found)?,
                Err(error) => self.report_error(&error),
            }
        }
        dirs.into_iter().try_for_each(|(found, path)| self.list_directories(found, path))
    }

    /// Lists a directory and, with -R, its subdirectories, on a stack: a tree may be deep.
    fn list_directories(&mut self, start: InodeNumber, path: &[u8]) -> anyhow::Result<()> {
        let mut stack = vec![(start, path.to_vec())];
        let mut seen = std::collections::HashSet::from([start]);
        while let Some((dir, path)) = stack.pop() {
            if self.has_headings && !self.arguments.json {
                if !self.first {
                    writeln!(self.out)?;
                }
                self.out.write_name(&path)?;
                writeln!(self.out, ":")?;
                self.first = false;
            }
            let listing = match image::list_directory(self.volume, dir, &self.display_path(&path)) {
                Ok(listing) => listing,
                Err(error) => {
                    self.report_error(&error);
                    continue;
                }
            };
            self.failed |= listing.damaged;
            let mut below = vec![];
            for entry in &listing.names {
                if entry.name.starts_with(b".") && !self.arguments.all {
                    continue;
                }
                let whole = join_path(&path, &entry.name);
                self.print_entry(&whole, &entry.name, entry.inode)?;
                let is_dir = self.arguments.recursive
                    && self.volume.inode(entry.inode).is_ok_and(|i| i.kind == FileType::Directory);
                // In a damaged volume a directory may be below itself.
                if is_dir && seen.insert(entry.inode) {
                    below.push((entry.inode, whole));
                }
            }
            stack.extend(below.into_iter().rev());
        }
        Ok(())
    }

    /// Returns a path for messages.
    fn display_path(&self, path: &[u8]) -> String {
        let image = self.arguments.targets.first().map(|target| target.image.shown().to_string());
        format!("{}:{}", image.unwrap_or_default(), escape_control_chars(path))
    }

    fn report_error(&mut self, error: &anyhow::Error) {
        self.failed = true;
        report::print_error(error);
    }

    /// Writes an entry; fails only if standard output does.
    fn print_entry(&mut self, path: &[u8], shown: &[u8], inode: InodeNumber) -> anyhow::Result<()> {
        let written = match self.arguments.json {
            true => self.print_json_object(path, inode),
            false => self.print_line(path, shown, inode),
        };
        match written {
            Err(error) if error.is::<std::io::Error>() => Err(error),
            Err(error) => {
                self.report_error(&error);
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    fn print_line(&mut self, path: &[u8], name: &[u8], inode: InodeNumber) -> anyhow::Result<()> {
        if self.arguments.long {
            let shown = self.display_path(path);
            let named = |error| with_context(&shown, error);
            let attributes = self.volume.attributes(inode).map_err(named)?;
            let is_link = attributes.kind == FileType::Symlink;
            let target = is_link.then(|| self.volume.read_link(inode)).transpose();
            let line = format_long(&attributes, &self.clock, self.arguments.human);
            write!(self.out, "{line} ")?;
            self.out.write_name(name)?;
            match target {
                Ok(Some(target)) => {
                    write!(self.out, " -> ")?;
                    self.out.write_name(&target)?;
                }
                Ok(None) => {}
                Err(error) => self.report_error(&named(error)),
            }
        } else {
            self.out.write_name(name)?;
        }
        writeln!(self.out)?;
        self.first = false;
        Ok(())
    }

    fn print_json_object(&mut self, path: &[u8], inode: InodeNumber) -> anyhow::Result<()> {
        let facts = InodeJson::from_inode(self.volume, inode);
        let (facts, error) = match facts {
            Ok(facts) => (Some(facts), None),
            Err(error) => (None, Some(error)),
        };
        let name = path.rsplit(|byte| *byte == b'/').find(|name| !name.is_empty());
        let name = name.unwrap_or(b"/");
        let object = EntryJson {
            path: escape_non_utf8(path),
            path_hex: hex_if_not_utf8(path),
            name: escape_non_utf8(name),
            name_hex: hex_if_not_utf8(name),
            inode: inode.0,
            facts,
            error: error.as_ref().map(ToString::to_string),
        };
        let object = serde_json::to_string(&object)?;
        write!(self.out, "{}\n{object}", if self.first { "" } else { "," })?;
        self.first = false;
        error.map_or(Ok(()), |error| Err(with_context(&self.display_path(path), error)))
    }
}

/// JSON form of a directory entry.
#[derive(Serialize)]
struct EntryJson {
    path: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    path_hex: Option<String>,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    name_hex: Option<String>,
    inode: u32,
    #[serde(flatten)]
    facts: Option<InodeJson>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// JSON form of an inode.
#[derive(Serialize)]
struct InodeJson {
    kind: &'static str,
    mode: String,
    links: u32,
    uid: u32,
    gid: u32,
    size: u64,
    device: Option<(u32, u32)>,
    link_target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    link_target_hex: Option<String>,
    modified: (i64, u32),
}

impl InodeJson {
    fn from_inode(volume: &Volume, inode: InodeNumber) -> draconis_ext::Result<Self> {
        let found = volume.attributes(inode)?;
        let is_device = matches!(found.kind, FileType::CharDevice | FileType::BlockDevice);
        let is_link = found.kind == FileType::Symlink;
        let target = is_link.then(|| volume.read_link(inode)).transpose()?;
        Ok(Self {
            kind: text::file_type_name(found.kind),
            mode: format!("{:04o}", found.mode & 0o7777),
            links: found.links,
            uid: found.uid,
            gid: found.gid,
            size: found.size_bytes,
            device: is_device.then_some(found.device),
            link_target: target.as_deref().map(escape_non_utf8),
            link_target_hex: target.as_deref().and_then(hex_if_not_utf8),
            modified: (found.modified.seconds, found.modified.nanoseconds),
        })
    }
}

/// Formats the columns of `ls -ln` before the name.
fn format_long(attributes: &Attributes, clock: &TimeFormatter, human: bool) -> String {
    let size = match attributes.kind {
        FileType::CharDevice | FileType::BlockDevice => {
            format!("{}, {}", attributes.device.0, attributes.device.1)
        }
        _ if human => human_size(attributes.size_bytes),
        _ => attributes.size_bytes.to_string(),
    };
    format!(
        "{} {:>3} {:>5} {:>5} {size:>10} {}",
        text::format_mode(attributes.mode),
        attributes.links,
        attributes.uid,
        attributes.gid,
        clock.format_to_minute(attributes.modified)
    )
}

/// Formats a size as `ls -h` does: rounded up, with one decimal below ten.
fn human_size(bytes: u64) -> String {
    let units = ["K", "M", "G", "T", "P", "E"];
    let nth = (bytes.max(1).ilog2() / 10) as usize;
    let tenths = |nth: usize| (u128::from(bytes) * 10).div_ceil(1 << (10 * nth));
    // A size that rounds up to 1024 is shown in the next unit.
    let nth = nth + usize::from(nth > 0 && tenths(nth) > 10_230);
    match nth.checked_sub(1).and_then(|nth| units.get(nth)) {
        None => bytes.to_string(),
        Some(unit) => match tenths(nth) {
            few @ 0..=99 => format!("{}.{}{unit}", few / 10, few % 10),
            many => format!("{}{unit}", many.div_ceil(10)),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn human_sizes_are_formatted_as_by_ls() {
        for (bytes, shown) in [
            (0, "0"),
            (1023, "1023"),
            (1024, "1.0K"),
            (1025, "1.1K"),
            (10 << 10, "10K"),
            ((10 << 10) + 1, "11K"),
            ((1 << 20) - 1, "1.0M"),
            (1023 << 10, "1023K"),
            (u64::MAX, "16E"),
        ] {
            assert_eq!(human_size(bytes), shown, "{bytes}");
        }
    }

    #[test]
    fn non_utf8_names_are_escaped_losslessly() {
        assert_eq!(
            (escape_non_utf8(b"a\n\xc3\xa9"), hex_if_not_utf8(b"a\n\xc3\xa9")),
            ("a\né".into(), None)
        );
        assert_eq!(
            (escape_non_utf8(b"a\xff"), hex_if_not_utf8(b"a\xff")),
            ("a\\xff".into(), Some("61ff".into()))
        );
    }
}
