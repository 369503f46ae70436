//! Container images: finding their layers, and verifying them by digest.
//!
//! ```text
//!   OCI     index ─▶ (index ─▶) manifest ─▶ configuration, layers     each by its digest
//!   docker  manifest.json ─▶ configuration, layers                    by name; digests inside
//! ```
//! Law 1: nothing is used before its digest was verified.
//! Law 2: an image refers to its own blobs only, never to other host paths.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer};

use super::blob::Blob;
use super::digest::BlobDigest;
use super::layers::ImageLayer;
use super::merge::split_path;
use super::platform::ImagePlatform;

use super::tar::TarEntries;
use crate::messages::escape_control_chars;

/// Maximum length of a JSON document, in bytes; the limit of registries.
const MAX_JSON_BYTES: u64 = 4 << 20;
/// Maximum nesting of indexes.
const MAX_INDEX_DEPTH: u32 = 4;
/// Maximum number of layers of one image.
const MAX_LAYERS: usize = 4096;
/// Maximum number of files in one image archive.
const MAX_MEMBERS: usize = 65_536;

/// Annotation with an image's tag in an index.
pub const OCI_REF_NAME_ANNOTATION: &str = "org.opencontainers.image.ref.name";
/// Annotation with the image name, as containerd and docker add it.
const CONTAINERD_IMAGE_NAME_ANNOTATION: &str = "io.containerd.image.name";

/// Options for reading archives and images.
pub struct ImageOptions<'a> {
    /// Platform to choose from a multi-platform image; that of this machine if `None`.
    pub platform: Option<ImagePlatform>,
    /// Path in whose directory temporary files are created.
    pub temp_dir_of: &'a Path,
    /// Limit for the decompressed size of an archive.
    pub limit: Option<u64>,
}

#[derive(Deserialize)]
struct OciIndex {
    #[serde(default, deserialize_with = "null_as_default")]
    manifests: Vec<OciDescriptor>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OciDescriptor {
    #[serde(default)]
    media_type: String,
    digest: String,
    size: u64,
    platform: Option<ImagePlatform>,
    #[serde(default, deserialize_with = "null_as_default")]
    annotations: HashMap<String, String>,
    /// External addresses of a layer that must not be distributed.
    #[serde(default, deserialize_with = "null_as_default")]
    urls: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct OciManifest {
    #[serde(default)]
    schema_version: u32,
    config: Option<OciDescriptor>,
    #[serde(default, deserialize_with = "null_as_default")]
    layers: Vec<OciDescriptor>,
    manifests: Option<Vec<OciDescriptor>>,
}

/// The fields of a configuration that are used.
#[derive(Deserialize)]
struct ImageConfig {
    #[serde(flatten)]
    platform: Option<ImagePlatform>,
    rootfs: Option<RootFs>,
}

#[derive(Deserialize)]
struct RootFs {
    #[serde(default, deserialize_with = "null_as_default")]
    diff_ids: Vec<String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerManifest {
    config: String,
    #[serde(default, deserialize_with = "null_as_default")]
    repo_tags: Vec<String>,
    #[serde(default, deserialize_with = "null_as_default")]
    layers: Vec<String>,
}

/// Deserializes a list or map; Go programs write `null` for an empty one.
fn null_as_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(
    from: D,
) -> Result<T, D::Error> {
    Option::deserialize(from).map(Option::unwrap_or_default)
}

/// Opens an image and verifies every digest.
pub fn open(
    kind: ImageKind,
    path: &Path,
    tag: Option<&str>,
    choice: &ImageOptions<'_>,
) -> anyhow::Result<SourceArchives> {
    match kind {
        ImageKind::OciDirectory => {
            ensure!(path.is_dir(), "not a directory; an archive is oci-archive:FILE");
            open_oci_layers(&BlobStore::Directory(path.to_path_buf()), tag, choice)
        }
        ImageKind::OciArchive => {
            open_oci_layers(&BlobStore::index_archive(path, choice)?, tag, choice)
        }
        ImageKind::DockerArchive => {
            open_docker_layers(&BlobStore::index_archive(path, choice)?, tag, choice)
        }
    }
}

/// Files of an image.
enum BlobStore {
    Directory(PathBuf),
    Archive(HashMap<Vec<u8>, ArchiveMember>),
}

enum ArchiveMember {
    File(Blob),
    Link(Vec<u8>),
}

impl BlobStore {
    fn index_archive(path: &Path, choice: &ImageOptions<'_>) -> anyhow::Result<Self> {
        ensure!(!path.is_dir(), "a directory; an image in one is oci:DIR");
        let archive = Blob::new(File::open(path)?, choice.temp_dir_of)?;
        // The members are read in random order.
        let archive = archive.decompress_to_file(choice.limit, choice.temp_dir_of)?;
        let mut members = HashMap::new();
        let mut entries = TarEntries::new(&archive, None)?;
        while let Some(entry) = entries.next()? {
            let name = split_path(&entry.name)?.join(&b'/');
            let at = entries.reader.at;
            entries.reader.skip_contents(entry.size)?;
            let member = match entry.kind() {
                b'0' => archive.sub_range(at, entry.size).map(ArchiveMember::File),
                b'1' => Some(ArchiveMember::Link(entry.target())),
                // docker save writes links for equal layers.
                b'2' => {
                    let dir = name.rsplitn(2, |byte| *byte == b'/').nth(1).unwrap_or_default();
                    resolve_link_target(dir, &entry.target()).map(ArchiveMember::Link)
                }
                _ => None,
            };
            members.extend(member.map(|member| (name, member)));
            ensure!(members.len() <= MAX_MEMBERS, "more than {MAX_MEMBERS} files: no image");
        }
        Ok(Self::Archive(members))
    }

    fn open_blob(&self, name: &str) -> anyhow::Result<Blob> {
        let missing = || format!("{name} is missing: the image is not complete");
        match self {
            Self::Directory(dir) => {
                let file = File::open(dir.join(name)).with_context(missing)?;
                ensure!(file.metadata()?.is_file(), "{name} is not a file");
                Blob::new(file, dir)
            }
            Self::Archive(members) => {
                let mut at = split_path(name.as_bytes())?.join(&b'/');
                for _ in 0..4 {
                    match members.get(&at).with_context(missing)? {
                        ArchiveMember::File(blob) => return Ok(blob.clone()),
                        ArchiveMember::Link(to) => at = split_path(to)?.join(&b'/'),
                    }
                }
                bail!("{name} is a link to links")
            }
        }
    }

    /// Returns the blob that a descriptor names, after comparing its length and digest.
    fn open_verified_blob(&self, what: &OciDescriptor) -> anyhow::Result<Blob> {
        let digest = BlobDigest::parse(&what.digest)?;
        let blob = self.open_blob(&digest.blob_path())?;
        ensure!(
            blob.len() == what.size,
            "{}: {} bytes long, and should have {}: damaged or cut off",
            what.digest,
            blob.len(),
            what.size
        );
        digest.verify(blob.raw_reader()).with_context(|| what.digest.clone())?;
        Ok(blob)
    }
}

/// Resolves a link target relative to a directory; `None` if it leads out.
fn resolve_link_target(dir: &[u8], target: &[u8]) -> Option<Vec<u8>> {
    if target.starts_with(b"/") {
        return None;
    }
    let mut names: Vec<&[u8]> = vec![];
    for part in dir.split(|byte| *byte == b'/').chain(target.split(|byte| *byte == b'/')) {
        match part {
            b"" | b"." => {}
            b".." => drop(names.pop()?),
            name => names.push(name),
        }
    }
    Some(names.join(&b'/'))
}

fn parse_json_blob<T: DeserializeOwned>(blob: &Blob, what: &str) -> anyhow::Result<T> {
    let text = blob.read_all(MAX_JSON_BYTES).with_context(|| what.to_owned())?;
    serde_json::from_slice(&text).with_context(|| format!("{what} makes no sense"))
}

fn open_oci_layers(
    store: &BlobStore,
    tag: Option<&str>,
    choice: &ImageOptions<'_>,
) -> anyhow::Result<SourceArchives> {
    let index = store.open_blob("index.json").context("not an OCI image")?;
    let index: OciIndex = parse_json_blob(&index, "index.json")?;
    let named = manifests_by_tag(&index.manifests, tag)?;
    let mut found = select_manifest(&named, choice.platform.as_ref())?;
    for _ in 0..MAX_INDEX_DEPTH {
        let what = format!("the manifest {}", found.digest);
        let manifest: OciManifest = parse_json_blob(&store.open_verified_blob(&found)?, &what)?;
        if let Some(manifests) = &manifest.manifests {
            found = select_manifest(manifests, choice.platform.as_ref())?;
            continue;
        }
        ensure!(manifest.schema_version != 1, "{what} is of version 1, which is not read");
        let config = manifest.config.with_context(|| format!("{what} has no configuration"))?;
        return open_layers(store, &config, &manifest.layers, choice);
    }
    bail!("indexes that lead to indexes and to no manifest")
}

/// Returns the manifests with a tag, or all.
fn manifests_by_tag(
    manifests: &[OciDescriptor],
    tag: Option<&str>,
) -> anyhow::Result<Vec<OciDescriptor>> {
    let names = |it: &OciDescriptor| -> Vec<String> {
        [OCI_REF_NAME_ANNOTATION, CONTAINERD_IMAGE_NAME_ANNOTATION]
            .iter()
            .filter_map(|key| it.annotations.get(*key).cloned())
            .collect()
    };
    let mut all: Vec<String> = manifests.iter().flat_map(names).collect();
    all.sort();
    all.dedup();
    let Some(tag) = tag else {
        let mut first: Vec<_> =
            manifests.iter().map(|it| it.annotations.get(OCI_REF_NAME_ANNOTATION)).collect();
        first.dedup();
        ensure!(
            first.len() <= 1,
            "several images; name one behind a colon: {}",
            all.iter()
                .map(|name| escape_control_chars(name.as_bytes()))
                .collect::<Vec<_>>()
                .join(", ")
        );
        return Ok(manifests.to_vec());
    };
    let found: Vec<_> =
        manifests.iter().filter(|it| names(it).iter().any(|name| name == tag)).cloned().collect();
    ensure!(
        !found.is_empty(),
        "no image {tag}; there is: {}",
        all.iter().map(|name| escape_control_chars(name.as_bytes())).collect::<Vec<_>>().join(", ")
    );
    Ok(found)
}

/// Returns the manifest for a platform.
fn select_manifest(
    manifests: &[OciDescriptor],
    wanted: Option<&ImagePlatform>,
) -> anyhow::Result<OciDescriptor> {
    // Indexes list attestations beside the images.
    let images: Vec<&OciDescriptor> = manifests
        .iter()
        .filter(|it| it.platform.as_ref().is_none_or(|platform| !platform.is_unknown()))
        .collect();
    if let [only] = images[..]
        && wanted.is_none_or(|_| only.platform.is_none())
    {
        return Ok(only.clone());
    }
    let own = ImagePlatform::host();
    let wanted = wanted.unwrap_or(&own);
    let fits =
        |it: &&&OciDescriptor| it.platform.as_ref().is_some_and(|it| wanted.is_compatible_with(it));
    let found = images.iter().find(fits);
    found.map(|it| (*it).clone()).with_context(|| {
        let there = images.iter().filter_map(|it| it.platform.as_ref());
        let there: Vec<String> = there.map(ToString::to_string).collect();
        match there.is_empty() {
            true if images.is_empty() => "the index has no image".to_owned(),
            true => "several images, and neither a name nor a platform of any: \
                     skopeo copy takes one by its digest"
                .to_owned(),
            false => format!("no image for {wanted}; --platform takes one of {}", there.join(", ")),
        }
    })
}

fn open_layers(
    store: &BlobStore,
    config: &OciDescriptor,
    layers: &[OciDescriptor],
    choice: &ImageOptions<'_>,
) -> anyhow::Result<SourceArchives> {
    ensure!(layers.len() <= MAX_LAYERS, "{} layers", layers.len());
    let text =
        store.open_verified_blob(config)?.read_all(MAX_JSON_BYTES).context("the configuration")?;
    let mut found = vec![];
    for layer in layers {
        let kind = &layer.media_type;
        ensure!(!kind.contains("encrypted"), "a layer is encrypted ({kind}): decrypt it first");
        ensure!(
            kind.is_empty() || kind.contains(".tar") || kind.contains("layer"),
            "not an image of a file system: it holds {kind}"
        );
        if let (Some(url), Err(_)) = (layer.urls.first(), store.open_verified_blob(layer)) {
            bail!(
                "the layer {} may not be handed on and is at {}: download it to {}",
                layer.digest,
                escape_control_chars(url.as_bytes()),
                BlobDigest::parse(&layer.digest)?.blob_path()
            );
        }
        let archive = store.open_verified_blob(layer)?;
        let display_name = format!("layer {}", layer.digest);
        found.push(ImageLayer { archive, display_name, whiteouts: true });
    }
    if let Ok(config) = serde_json::from_slice::<ImageConfig>(&text) {
        check_platform(&config, choice)?;
    }
    Ok(SourceArchives { layers: found, config: Some(text) })
}

fn check_platform(config: &ImageConfig, choice: &ImageOptions<'_>) -> anyhow::Result<()> {
    if let (Some(wanted), Some(found)) = (&choice.platform, &config.platform) {
        ensure!(wanted.is_compatible_with(found), "the image is for {found}, not for {wanted}");
    }
    Ok(())
}

fn open_docker_layers(
    store: &BlobStore,
    tag: Option<&str>,
    choice: &ImageOptions<'_>,
) -> anyhow::Result<SourceArchives> {
    let manifest = store.open_blob("manifest.json").context("not what docker save writes")?;
    let mut saved: Vec<DockerManifest> = parse_json_blob(&manifest, "manifest.json")?;
    let all: Vec<&str> = saved.iter().flat_map(|it| &it.repo_tags).map(String::as_str).collect();
    let all = escape_control_chars(all.join(", ").as_bytes());
    let nth = match tag {
        Some(tag) => {
            let fits = |name: &String| name == tag || name.strip_suffix(":latest") == Some(tag);
            let nth = saved.iter().position(|it| it.repo_tags.iter().any(fits));
            nth.with_context(|| format!("no image {tag}; there is: {all}"))?
        }
        None if saved.len() == 1 => 0,
        None if saved.is_empty() => bail!("manifest.json names no image"),
        None => bail!("several images; name one behind a colon: {all}"),
    };
    let saved = saved.swap_remove(nth);
    let text =
        store.open_blob(&saved.config)?.read_all(MAX_JSON_BYTES).context("the configuration")?;
    // The name contains the digest, in one of two forms.
    let hex = saved.config.rsplit('/').next().unwrap_or_default();
    if let Ok(digest) = BlobDigest::parse(&format!("sha256:{}", hex.trim_end_matches(".json"))) {
        digest.verify(&text[..]).context("the configuration")?;
    }
    let config: ImageConfig = serde_json::from_slice(&text).context("the configuration")?;
    check_platform(&config, choice)?;
    let ids = config.rootfs.map(|rootfs| rootfs.diff_ids).unwrap_or_default();
    ensure!(
        ids.len() == saved.layers.len() && ids.len() <= MAX_LAYERS,
        "{} layers, and digests of {}",
        saved.layers.len(),
        ids.len()
    );
    let mut layers = vec![];
    for (name, id) in saved.layers.iter().zip(&ids) {
        let archive = store.open_blob(name)?;
        let digest = BlobDigest::parse(id)?;
        let compared = digest.verify(archive.decompress(choice.limit)?);
        compared.with_context(|| format!("the layer {name}"))?;
        layers.push(ImageLayer { archive, display_name: format!("layer {name}"), whiteouts: true });
    }
    Ok(SourceArchives { layers, config: Some(text) })
}

/// Archives of a source.
pub(super) struct SourceArchives {
    pub layers: Vec<ImageLayer>,
    /// Configuration of the image.
    pub config: Option<Vec<u8>>,
}

/// Storage of a container image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A directory in OCI layout.
    OciDirectory,
    /// An OCI layout in a tar archive.
    OciArchive,
    /// An archive of `docker save`.
    DockerArchive,
}

impl ImageKind {
    pub(super) const ALL: [(&'static str, Self); 3] = [
        ("oci:", Self::OciDirectory),
        ("oci-archive:", Self::OciArchive),
        ("docker-archive:", Self::DockerArchive),
    ];
}
