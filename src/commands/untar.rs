//! `draconis untar`: extracts an archive into a volume.

use std::process::ExitCode;

use anyhow::bail;
use clap::Args;
use draconis_access::populate::{self, ExcludePatterns, ScanRequest, ScanResult, SourceSpec};
use draconis_ext::mkfs::{NodeKind, TreeNode};
use draconis_ext::{Error, Follow};
use draconis_types::FileType;

use crate::archive_args::ArchiveArgs;
use crate::edit::{self, OwnerArg};
use crate::image::{self, BackingFiles, WriteArgs};
use crate::import_tree::{ImportOptions, import_tree, timestamp_policy};
use crate::progress::ProgressMode;
use crate::target::ImagePath;

/// Extract tar archives or a container image into a volume.
#[derive(Debug, Args)]
pub struct Arguments {
    /// Where the volume is.
    #[command(flatten)]
    place: WriteArgs,
    /// Tar archive (plain, gzip, zstd or xz) or container image, as for format --from (default:
    /// standard input). Repeatable: later archives and images override earlier ones.
    #[arg(short, long, value_name = "TAR|IMAGE")]
    file: Vec<SourceSpec>,
    /// How archives and images are read.
    #[command(flatten)]
    reading: ArchiveArgs,
    /// Set the owner of all files.
    #[arg(long, value_name = "UID:GID")]
    owner: Option<OwnerArg>,
    /// When to show progress.
    #[arg(long, value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,
    /// Destination directory (default: the root directory).
    #[arg(value_name = "IMAGE[:/path]")]
    target: ImagePath,
}

pub fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let target = &arguments.target;
    let input = [SourceSpec::Stdin];
    let from = if arguments.file.is_empty() { &input[..] } else { &arguments.file };
    if let Some(dir) = from.iter().find(|from| from.is_directory()) {
        bail!("{dir}: is a directory; draconis put -r takes one");
    }
    let stamp = timestamp_policy()?;
    let opened = (
        image::open_writable(&target.image, arguments.place.force)?,
        BackingFiles::open(&target.image, &arguments.place.backing)?,
    );
    let root = TreeNode::new(NodeKind::Directory, 0o755).with_all_times(stamp.now);
    let exclude = ExcludePatterns::new(arguments.reading.exclude_patterns());
    let image_options = arguments.reading.image_options(&target.image);
    let keep_owners = arguments.owner.is_none();
    let wanted = ScanRequest {
        from,
        list: None,
        exclude: &exclude,
        image_options,
        keep_owners,
        root,
        stamp,
    };
    let ScanResult { source, config } = populate::scan_source(wanted)?;
    let mut sources = populate::sources_to_protect(from);
    sources.add(&target.image);
    arguments.reading.write_config(config.as_deref(), &sources)?;
    // The archive is open or decompressed: no other host file is needed.
    image::confine_to_open_files()?;
    edit::edit_open_image(opened, &target.image, &arguments.place, |volume| {
        let into = match volume.resolve(volume.root(), &target.path, Follow::Yes) {
            Err(Error::NotFound) => {
                bail!("{target}: no such directory; draconis mkdir -p makes it")
            }
            found => found.map_err(|error| edit::with_context(target, error))?,
        };
        if volume.inode(into)?.kind != FileType::Directory {
            bail!("{target}: not a directory");
        }
        let Arguments { owner, progress, .. } = *arguments;
        let how = ImportOptions { owner, replace_kinds: true, progress };
        import_tree(volume, &source, into, target.to_string(), how)
    })
}
