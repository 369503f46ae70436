//! `draconis tar`: a tree of a volume as a POSIX (pax) archive, or as a container image.

mod oci;

use std::io::{self, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::Args;
use draconis_access::populate::ImagePlatform;
use draconis_access::tar::{self, SparseFormat, TarObserver, TarOptions};
use draconis_ext::Follow;
use draconis_types::path_bytes::ShowPath;

use crate::image::{self, ReadArgs, resolve_target};
use crate::new_file::OutputFile;
use crate::progress::{ByteProgress, ProgressMode};
use crate::report;
use crate::target::ImagePath;

/// Export a directory of a volume as a tar archive or container image.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: ReadArgs,
    /// Store files with holes as sparse: auto (at least 1 MiB of holes), always, never.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto, hide_possible_values = true,
        value_name = "auto|always|never")]
    sparse: ProgressMode,
    /// Write a single-layer OCI image archive to OUT.
    #[arg(long, value_name = "OUT")]
    oci: Option<PathBuf>,
    /// Name of the image.
    #[arg(long, value_name = "TAG", requires = "oci")]
    tag: Option<String>,
    /// Read the image configuration (entry point, environment, user) from FILE, as format --config
    /// writes it.
    #[arg(long, value_name = "FILE", requires = "oci")]
    config: Option<PathBuf>,
    /// Platform of the image (default: that of the configuration, or this machine).
    #[arg(long, value_name = "OS/ARCH", requires = "oci")]
    platform: Option<ImagePlatform>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Directory to archive (default: the root directory).
    #[arg(value_name = "IMAGE[:/path]")]
    target: ImagePath,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Some(path) = &arguments.oci else {
        if io::stdout().is_terminal() {
            bail!(
                "the archive would be written to your terminal; redirect it: draconis tar ... > \
                 out.tar"
            );
        }
        return write_archive(arguments, None, io::stdout().lock()).map(|(code, _)| code);
    };
    let shown = || path.shown().to_string();
    let Arguments { platform, config, tag, .. } = arguments;
    let about = oci::ImageMetadata::new(platform.clone(), config.as_deref(), tag.clone())?;
    let mut sources = image::sources_to_protect(&arguments.target.image, &arguments.place.volume);
    config.iter().for_each(|file| sources.add(file));
    let (file, output) = OutputFile::begin(&sources, path)?;
    let layer = oci::OciImageWriter::begin_image(file).with_context(shown)?;
    // The process can only create files in that directory.
    let (code, layer) = write_archive(arguments, Some(output.dir().as_fd()), layer)?;
    layer.finish_image(about).with_context(shown)?;
    output.publish().with_context(shown)?;
    Ok(code)
}

/// Writes the archive; returns the exit code and the output, which gets its name in `beneath`.
fn write_archive<W: Write>(
    arguments: &Arguments,
    beneath: Option<BorrowedFd<'_>>,
    out: W,
) -> anyhow::Result<(ExitCode, W)> {
    let target = &arguments.target;
    let tree = image::open(&target.image, &arguments.place, beneath)?;
    let volume = tree.volume();
    let top = resolve_target(volume, target, Follow::Yes)?;
    let is_layer = arguments.oci.is_some();
    let how = TarOptions {
        // A layer's root directory has no name.
        prefix: if is_layer { vec![] } else { target.file_name().to_vec() },
        sparse: match arguments.sparse {
            ProgressMode::Auto => SparseFormat::Auto,
            ProgressMode::Always => SparseFormat::Always,
            ProgressMode::Never => SparseFormat::Never,
        },
        is_layer,
    };
    let mut watch = TarProgress { when: arguments.progress, bar: None };
    let (whole, out) =
        tar::write_archive(volume, (top, &target.to_string()), how, &mut watch, out)?;
    Ok((if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE }, out))
}

/// A progress bar; errors go to standard error.
struct TarProgress {
    when: ProgressMode,
    bar: Option<ByteProgress>,
}

impl TarObserver for TarProgress {
    fn on_start(&mut self, bytes: u64) {
        self.bar = Some(ByteProgress::new(self.when, bytes));
    }

    fn on_written(&mut self, bytes: u64) {
        if let Some(bar) = &mut self.bar {
            bar.add(bytes);
        }
    }

    fn on_error(&mut self, error: &anyhow::Error) {
        report::print_error(error);
    }
}
