//! `draconis stat`

use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use draconis_ext::{Follow, Volume};
use draconis_types::{Attributes, FileType, Time};
use serde::Serialize;

use crate::edit::{single_image, with_context};
use crate::image::{self, ReadArgs, resolve_target};
use crate::report;
use crate::target::ImagePath;
use crate::text::{self, EscapingOutput, TimeFormatter, escape_control_chars};

/// Show the metadata of files in a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: ReadArgs,
    /// Print JSON: a list.
    #[arg(long)]
    json: bool,
    /// Follow symbolic links.
    #[arg(short = 'L', long)]
    dereference: bool,
    /// Files.
    #[arg(value_name = "IMAGE:/path", required = true)]
    targets: Vec<ImagePath>,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let clock = TimeFormatter::new();
    let tree = image::open(single_image(&arguments.targets)?, &arguments.place, None)?;
    let follow = if arguments.dereference { Follow::Yes } else { Follow::No };
    let mut out = EscapingOutput::new();
    let mut code = ExitCode::SUCCESS;
    let mut found = vec![];
    for target in &arguments.targets {
        match FileJson::from_target(tree.volume(), target, follow) {
            Ok(facts) if arguments.json => found.push(facts),
            Ok(facts) => facts.write(&clock, &mut out)?,
            Err(error) => {
                report::print_error(&error);
                code = ExitCode::FAILURE;
            }
        }
    }
    if arguments.json {
        writeln!(out, "{}", serde_json::to_string_pretty(&found)?)?;
    }
    out.flush()?;
    Ok(code)
}

/// JSON form of an inode's metadata.
#[derive(Serialize)]
struct FileJson {
    path: String,
    inode: u64,
    generation: u32,
    kind: &'static str,
    mode: String,
    links: u32,
    uid: u32,
    gid: u32,
    size: u64,
    blocks_512: u64,
    io_block: u32,
    flags: u32,
    device: Option<(u32, u32)>,
    link_target: Option<String>,
    accessed: (i64, u32),
    modified: (i64, u32),
    changed: (i64, u32),
    created: Option<(i64, u32)>,
    /// Number of contiguous runs of blocks.
    runs: Option<u64>,
    xattrs: Vec<String>,
    #[serde(skip)]
    attributes: Attributes,
}

impl FileJson {
    fn from_target(volume: &Volume, target: &ImagePath, follow: Follow) -> anyhow::Result<Self> {
        let number = resolve_target(volume, target, follow)?;
        let named = |error| with_context(target, error);
        let attributes = volume.attributes(number).map_err(named)?;
        let pair = |time: Time| (time.seconds, time.nanoseconds);
        let device = matches!(attributes.kind, FileType::CharDevice | FileType::BlockDevice);
        let link = attributes.kind == FileType::Symlink;
        let target_of_link = link.then(|| volume.read_link(number)).transpose().map_err(named)?;
        let xattrs = volume.xattr_names(number).map_err(named)?;
        Ok(Self {
            path: escape_control_chars(&target.path),
            inode: number.0.into(),
            generation: attributes.generation,
            kind: text::file_type_name(attributes.kind),
            mode: format!("{:04o}", attributes.mode & 0o7777),
            links: attributes.links,
            uid: attributes.uid,
            gid: attributes.gid,
            size: attributes.size_bytes,
            blocks_512: attributes.blocks_512,
            io_block: attributes.block_size_bytes,
            flags: attributes.flags,
            device: device.then_some(attributes.device),
            link_target: target_of_link.map(|target| escape_control_chars(&target)),
            accessed: pair(attributes.accessed),
            modified: pair(attributes.modified),
            changed: pair(attributes.changed),
            created: attributes.created.map(pair),
            runs: match attributes.kind {
                FileType::File | FileType::Directory => {
                    count_extents(volume, number).map_err(named)?
                }
                _ => None,
            },
            xattrs: xattrs.iter().map(|name| escape_control_chars(name)).collect(),
            attributes,
        })
    }

    /// Writes the format of coreutils' `stat`, plus fields specific to ext.
    fn write(&self, clock: &TimeFormatter, out: &mut EscapingOutput) -> std::io::Result<()> {
        let attributes = &self.attributes;
        write!(out, "  File: {}", self.path)?;
        match &self.link_target {
            Some(target) => writeln!(out, " -> {target}")?,
            None => writeln!(out)?,
        }
        writeln!(
            out,
            "  Size: {:<15} Blocks: {:<10} IO Block: {:<6} {}",
            self.size, self.blocks_512, self.io_block, self.kind
        )?;
        write!(out, " Inode: {:<15} Links: {:<5}", self.inode, self.links)?;
        match self.device {
            Some((major, minor)) => writeln!(out, " Device type: {major},{minor}")?,
            None => writeln!(out)?,
        }
        writeln!(
            out,
            "Access: ({}/{})  Uid: {:>5}   Gid: {:>5}",
            self.mode,
            text::format_mode(attributes.mode),
            self.uid,
            self.gid
        )?;
        writeln!(out, "Access: {}", clock.format_to_nanosecond(attributes.accessed))?;
        writeln!(out, "Modify: {}", clock.format_to_nanosecond(attributes.modified))?;
        writeln!(out, "Change: {}", clock.format_to_nanosecond(attributes.changed))?;
        match attributes.created {
            Some(created) => writeln!(out, " Birth: {}", clock.format_to_nanosecond(created))?,
            None => writeln!(out, " Birth: -")?,
        }
        write!(out, " Flags: {:#x}   Generation: {}", self.flags, self.generation)?;
        match self.runs {
            Some(runs) => writeln!(out, "   Runs: {runs}")?,
            None => writeln!(out)?,
        }
        for name in &self.xattrs {
            writeln!(out, " Xattr: {name}")?;
        }
        Ok(())
    }
}

/// Counts the contiguous runs of a file; `None` if it is encrypted.
fn count_extents(
    volume: &Volume,
    number: draconis_ext::InodeNumber,
) -> draconis_ext::Result<Option<u64>> {
    let inode = volume.inode(number)?;
    if inode.check_readable() == Err(draconis_ext::Error::NoKey) {
        return Ok(None);
    }
    let block_bytes = u64::from(volume.space().block_bytes);
    let (mut offset, mut runs) = (0, 0);
    let mut end = None;
    loop {
        let map = volume.map_inode(&inode, offset)?;
        let Some(last) = map.last() else { return Ok(Some(runs)) };
        for run in &map {
            if let draconis_ext::BlockLocation::Mapped(at) = run.location {
                // Adjacent extents count as one run.
                runs += u64::from(end != Some(at.0));
                end = Some(at.0 + u64::from(run.blocks));
            }
        }
        offset = (u64::from(last.from.0) + u64::from(last.blocks)) * block_bytes;
    }
}
