//! Command line options for reading archives and images.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use anyhow::ensure;
use clap::Args;
use draconis_access::destination::ReadSources;
use draconis_access::populate::{ImageOptions, ImagePlatform};

use crate::text::parse_size;

/// How archives and images are read.
#[derive(Debug, Args)]
pub struct ArchiveArgs {
    /// Platform of a multi-platform image (default: this machine).
    #[arg(long, value_name = "OS/ARCH")]
    platform: Option<ImagePlatform>,
    /// Save the image configuration to FILE as JSON.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Skip files that match PATTERN; a pattern with / matches the whole path, others any file
    /// name; ** matches any number of directories.
    #[arg(long, value_name = "PATTERN")]
    exclude: Vec<OsString>,
    /// Maximum uncompressed size of an archive (default: 16 GiB plus 100 times the archive size).
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    limit: Option<u64>,
}

impl ArchiveArgs {
    pub fn exclude_patterns(&self) -> impl Iterator<Item = &[u8]> {
        self.exclude.iter().map(|pattern| pattern.as_bytes())
    }

    /// Returns the image options. Temporary files go to the directory of `temp_dir_of`.
    pub fn image_options<'a>(&self, temp_dir_of: &'a Path) -> ImageOptions<'a> {
        ImageOptions { platform: self.platform.clone(), temp_dir_of, limit: self.limit }
    }

    /// Refuses a configuration file that is one of the sources.
    pub fn refuse_config_overwrite(&self, sources: &ReadSources) -> anyhow::Result<()> {
        self.config.as_deref().map_or(Ok(()), |path| sources.refuse_source_as_destination(path))
    }

    /// Fails if a configuration is requested and the sources have none.
    pub fn check_config(&self, config: Option<&[u8]>) -> anyhow::Result<()> {
        ensure!(
            self.config.is_none() || config.is_some(),
            "--config: only a container image has a configuration"
        );
        Ok(())
    }

    /// Writes the configuration if requested; never over a source.
    pub fn write_config(&self, config: Option<&[u8]>, sources: &ReadSources) -> anyhow::Result<()> {
        self.check_config(config)?;
        match (&self.config, config) {
            (Some(path), Some(config)) => sources.write(path, config),
            _ => Ok(()),
        }
    }
}
