//! Merging layers into one tree, as container engines do.
//!
//! ```text
//!   NAME             replaces what has the name; a directory keeps what the layers below put in it
//!   .wh.NAME         takes away what the layers below have under NAME
//!   .wh..wh..opq     takes away all that they have in this directory
//! ```
//! Law 1: a whiteout removes names of lower layers only, wherever in its layer it comes.
//! Law 2: no path leads out of the tree: symbolic links are resolved relative to the root of the
//! tree, as programs in it would.
//! Law 3: the memory of the tree is limited.

use std::collections::{HashMap, HashSet, VecDeque};

use anyhow::{Context, bail, ensure};
use draconis_ext::mkfs::{NodeId, NodeKind, Tree, TreeNode};

use super::TimestampPolicy;
use crate::messages::escape_control_chars;

/// Prefix of whiteout names.
const WHITEOUT_PREFIX: &[u8] = b".wh.";
/// Prefix of other special names; all but the opaque marker are skipped.
const SPECIAL_NAME_PREFIX: &[u8] = b".wh..wh.";
const OPAQUE_MARKER: &[u8] = b".wh..wh..opq";

/// Maximum number of symbolic links in one path, as in the kernel.
const MAX_SYMLINKS: u32 = 40;
/// Memory limit for all names and attributes.
const MAX_MEMORY_BYTES: u64 = 1 << 30;
/// Memory for one name, besides its bytes.
const ENTRY_MEMORY_BYTES: u64 = 350;

/// A tree that layers are merged into.
pub struct LayerMerger {
    pub tree: Tree,
    /// Directories that no entry has described yet.
    pub implied: HashSet<NodeId>,
    /// Hard links to targets outside the archives, and the paths of the targets.
    pub outside: HashMap<NodeId, Vec<u8>>,
    stamp: TimestampPolicy,
    /// True if whiteouts are active in this layer.
    whiteouts: bool,
    /// First node of this layer.
    first: Option<NodeId>,
    /// Names that this layer gave to nodes of lower layers.
    linked: HashSet<(NodeId, Vec<u8>)>,
    /// Lower directories in which this layer has entries, and those that it describes.
    modified_dirs: HashSet<NodeId>,
    described: HashSet<NodeId>,
    taken_bytes: u64,
}

impl LayerMerger {
    pub fn new(root: TreeNode, stamp: TimestampPolicy) -> Self {
        Self {
            tree: Tree::new(root),
            implied: HashSet::from([NodeId::ROOT]),
            outside: HashMap::new(),
            stamp,
            whiteouts: false,
            first: None,
            linked: HashSet::new(),
            modified_dirs: HashSet::new(),
            described: HashSet::new(),
            taken_bytes: 0,
        }
    }

    /// Begins a layer.
    pub fn begin_layer(&mut self, whiteouts: bool) {
        self.whiteouts = whiteouts;
        self.first = None;
        self.linked.clear();
        self.modified_dirs.clear();
        self.described.clear();
    }

    /// Charges memory against the limit.
    pub fn charge_memory(&mut self, bytes: u64) -> anyhow::Result<()> {
        self.taken_bytes = self.taken_bytes.saturating_add(bytes);
        ensure!(
            self.taken_bytes <= MAX_MEMORY_BYTES,
            "names and attributes up to this take more than {}",
            crate::messages::format_bytes(MAX_MEMORY_BYTES)
        );
        Ok(())
    }

    /// Adds a node over the lower layers, or applies a whiteout.
    pub fn add_entry(&mut self, path: &[u8], node: TreeNode) -> anyhow::Result<()> {
        self.charge_memory(ENTRY_MEMORY_BYTES + path.len() as u64)?;
        let parts = split_path(path)?;
        let Some((last, above)) = parts.split_last() else {
            ensure!(
                matches!(node.kind_data, NodeKind::Directory),
                "it has no name, or is the root directory, which it cannot be"
            );
            self.described.insert(NodeId::ROOT);
            return self.set_directory_node(NodeId::ROOT, node);
        };
        if self.whiteouts
            && last.starts_with(WHITEOUT_PREFIX) | above.iter().any(|it| is_reserved(it))
        {
            return self.apply_whiteout(above, last);
        }
        let dir = self.find_or_create_dir(above)?;
        let there = self.tree.lookup(dir, last);
        if let Some(there) = there
            && matches!(node.kind_data, NodeKind::Directory)
            && matches!(self.tree.node(there).kind_data, NodeKind::Directory)
        {
            self.described.insert(there);
            self.mark_dir_modified(there);
            return self.set_directory_node(there, node);
        }
        self.add_node(dir, last, node).map(drop)
    }

    /// Adds a hard link. A target outside the archives may be on the volume, so a placeholder node
    /// stands for it.
    pub fn add_hard_link(&mut self, path: &[u8], target: &[u8]) -> anyhow::Result<()> {
        self.charge_memory(ENTRY_MEMORY_BYTES + path.len() as u64)?;
        let target = split_path(target)
            .with_context(|| format!("a link to {}", escape_control_chars(target)))?;
        let to = self.find_node(&target)?;
        let is_dir =
            to.is_some_and(|to| matches!(self.tree.node(to).kind_data, NodeKind::Directory));
        ensure!(!is_dir, "a hard link to a directory");
        let parts = split_path(path)?;
        let (last, above) = parts.split_last().context("a link that is the root directory")?;
        if self.whiteouts
            && last.starts_with(WHITEOUT_PREFIX) | above.iter().any(|it| is_reserved(it))
        {
            return self.apply_whiteout(above, last);
        }
        let dir = self.find_or_create_dir(above)?;
        let Some(to) = to else {
            let target = target.join(&b'/');
            self.charge_memory(target.len() as u64)?;
            let empty = NodeKind::File { size_bytes: 0, data: vec![], source: u64::MAX };
            let id = self.add_node(dir, last, TreeNode::new(empty, 0))?;
            self.outside.insert(id, target);
            return Ok(());
        };
        self.tree.link(dir, last, to)?;
        self.linked.insert((dir, last.to_vec()));
        Ok(())
    }

    fn set_directory_node(&mut self, dir: NodeId, node: TreeNode) -> anyhow::Result<()> {
        if let Some(old) = self.tree.node_mut(dir) {
            *old = node;
        }
        self.implied.remove(&dir);
        Ok(())
    }

    fn add_node(&mut self, dir: NodeId, name: &[u8], node: TreeNode) -> anyhow::Result<NodeId> {
        let id = self.tree.add(dir, name, node)?;
        self.first.get_or_insert(id);
        self.linked.remove(&(dir, name.to_vec()));
        Ok(id)
    }

    fn is_added_by_layer(&self, id: NodeId) -> bool {
        self.first.is_some_and(|first| first <= id)
    }

    fn mark_dir_modified(&mut self, dir: NodeId) {
        if !self.is_added_by_layer(dir) {
            self.modified_dirs.insert(dir);
        }
    }

    /// Returns the directory with this path; creates missing ones.
    fn find_or_create_dir(&mut self, parts: &[&[u8]]) -> anyhow::Result<NodeId> {
        let mut walk = PathWalk::new(parts);
        while let Some(name) = walk.next()? {
            let dir = walk.dir();
            let child = self.tree.lookup(dir, &name);
            if let Some(child) = child
                && walk.enter(&self.tree, child)?
            {
                self.mark_dir_modified(child);
                continue;
            }
            if let Some(child) = child {
                let own =
                    self.is_added_by_layer(child) || self.linked.contains(&(dir, name.clone()));
                ensure!(!own, "its parent is no directory");
            }
            self.charge_memory(ENTRY_MEMORY_BYTES + name.len() as u64)?;
            let made = self.add_node(dir, &name, self.implied_dir_node())?;
            self.implied.insert(made);
            walk.stack.push(made);
        }
        Ok(walk.dir())
    }

    /// Returns the node of an implied directory.
    fn implied_dir_node(&self) -> TreeNode {
        let mut node = TreeNode::new(NodeKind::Directory, 0o755);
        self.stamp.set_times(&mut node, self.stamp.now, None, None);
        node
    }

    /// Returns the node with this path. Does not follow the last name.
    fn find_node(&self, parts: &[&[u8]]) -> anyhow::Result<Option<NodeId>> {
        let Some((last, above)) = parts.split_last() else { return Ok(Some(NodeId::ROOT)) };
        let mut walk = PathWalk::new(above);
        while let Some(name) = walk.next()? {
            match self.tree.lookup(walk.dir(), &name) {
                Some(child) if walk.enter(&self.tree, child)? => {}
                _ => return Ok(None),
            }
        }
        Ok(self.tree.lookup(walk.dir(), last))
    }

    fn apply_whiteout(&mut self, above: &[&[u8]], last: &[u8]) -> anyhow::Result<()> {
        let opaque = last == OPAQUE_MARKER;
        if above.iter().any(|name| is_reserved(name)) || is_reserved(last) && !opaque {
            // Internal files of AUFS.
            return Ok(());
        }
        let dir = self.find_or_create_dir(above)?;
        if opaque {
            let names: Vec<Vec<u8>> = self.tree.names(dir).map(|(name, _)| name.to_vec()).collect();
            return self.remove_lower(names.into_iter().map(|name| (dir, name)).collect());
        }
        let name = last.strip_prefix(WHITEOUT_PREFIX).unwrap_or_default();
        if matches!(name, b"" | b"." | b"..") {
            bail!("a whiteout of no name: it would take the directory itself away");
        }
        self.remove_lower(vec![(dir, name.to_vec())])
    }

    /// Removes names of lower layers.
    fn remove_lower(&mut self, mut names: Vec<(NodeId, Vec<u8>)>) -> anyhow::Result<()> {
        while let Some(name) = names.pop() {
            let Some(id) = self.tree.lookup(name.0, &name.1) else { continue };
            if self.is_added_by_layer(id) || self.linked.contains(&name) {
                continue;
            }
            if !self.modified_dirs.contains(&id) {
                self.tree.remove(name.0, &name.1);
                continue;
            }
            // This layer has the directory again: only the lower layers' entries in it go.
            names.extend(self.tree.names(id).map(|(name, _)| (id, name.to_vec())));
            if !self.described.contains(&id) {
                let implied = self.implied_dir_node();
                self.set_directory_node(id, implied)?;
                self.implied.insert(id);
            }
        }
        Ok(())
    }
}

fn is_reserved(name: &[u8]) -> bool {
    name.starts_with(SPECIAL_NAME_PREFIX)
}

/// A path walk that follows symbolic links.
struct PathWalk {
    stack: Vec<NodeId>,
    todo: VecDeque<Vec<u8>>,
    links: u32,
}

impl PathWalk {
    fn new(parts: &[&[u8]]) -> Self {
        let todo = parts.iter().map(|part| part.to_vec()).collect();
        Self { stack: vec![NodeId::ROOT], todo, links: 0 }
    }

    fn dir(&self) -> NodeId {
        self.stack.last().copied().unwrap_or(NodeId::ROOT)
    }

    /// Returns the next name to look up in [`PathWalk::dir`].
    fn next(&mut self) -> anyhow::Result<Option<Vec<u8>>> {
        loop {
            match self.todo.pop_front() {
                // Only link targets contain `..`; the parent of the root is the root.
                Some(name) if name == b".." => {
                    if self.stack.len() > 1 {
                        self.stack.pop();
                    }
                }
                Some(name) if name.is_empty() || name == b"." => {}
                other => return Ok(other),
            }
        }
    }

    /// Enters a child; returns false if it is neither a directory nor a symbolic link.
    fn enter(&mut self, tree: &Tree, child: NodeId) -> anyhow::Result<bool> {
        match &tree.node(child).kind_data {
            NodeKind::Directory => self.stack.push(child),
            NodeKind::Symlink(target) => {
                self.links += 1;
                ensure!(self.links <= MAX_SYMLINKS, "too many symbolic links on the way to it");
                if target.starts_with(b"/") {
                    self.stack.truncate(1);
                }
                for part in target.split(|byte| *byte == b'/').rev() {
                    self.todo.push_front(part.to_vec());
                }
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Splits a path into names. `..` removes the name before it, and never leads out of the tree.
pub fn split_path(path: &[u8]) -> anyhow::Result<Vec<&[u8]>> {
    let mut parts = vec![];
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => ensure!(parts.pop().is_some(), "its path leads out of the archive"),
            name => parts.push(name),
        }
    }
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use draconis_types::Time;

    /// Adds a directory if `path` ends with a slash, a symbolic link for `path -> target`, a hard
    /// link for `path = target`, and a file otherwise.
    fn add_test_layer(merge: &mut LayerMerger, layer: &str) -> anyhow::Result<()> {
        merge.begin_layer(true);
        let file = || NodeKind::File { size_bytes: 0, data: vec![], source: 0 };
        for entry in layer.split(", ").filter(|entry| !entry.is_empty()) {
            if let Some((path, target)) = entry.split_once(" -> ") {
                merge.add_entry(
                    path.as_bytes(),
                    TreeNode::new(NodeKind::Symlink(target.into()), 0o777),
                )?;
            } else if let Some((path, target)) = entry.split_once(" = ") {
                merge.add_hard_link(path.as_bytes(), target.as_bytes())?;
            } else {
                let what = if entry.ends_with('/') { NodeKind::Directory } else { file() };
                merge.add_entry(entry.as_bytes(), TreeNode::new(what, 0o700))?;
            }
        }
        Ok(())
    }

    fn merge_test_layers(layers: &[&str]) -> anyhow::Result<LayerMerger> {
        let stamp = TimestampPolicy { now: Time::default(), reproducible: false };
        let mut merge = LayerMerger::new(TreeNode::new(NodeKind::Directory, 0o755), stamp);
        for layer in layers {
            add_test_layer(&mut merge, layer)?;
        }
        Ok(merge)
    }

    fn format_merged_tree(layers: &[&str]) -> String {
        let merge = merge_test_layers(layers).unwrap();
        let mut all = vec![];
        let mut stack = vec![(String::new(), NodeId::ROOT)];
        while let Some((path, dir)) = stack.pop() {
            for (name, id) in merge.tree.names(dir) {
                let path = format!("{path}{}", String::from_utf8_lossy(name));
                let is_dir = matches!(merge.tree.node(id).kind_data, NodeKind::Directory);
                if is_dir {
                    stack.push((format!("{path}/"), id));
                }
                let implied = if merge.implied.contains(&id) { "?" } else { "" };
                all.push(format!("{path}{}{implied}", if is_dir { "/" } else { "" }));
            }
        }
        all.sort();
        all.join(" ")
    }

    #[test]
    fn later_layers_replace_and_add_entries() {
        assert_eq!(format_merged_tree(&["a/, a/x, b", "a/, a/y, b"]), "a/ a/x a/y b");
        assert_eq!(format_merged_tree(&["a/, a/x", "a"]), "a");
        assert_eq!(format_merged_tree(&["a", "a/, a/x"]), "a/ a/x");
        assert_eq!(format_merged_tree(&["a", "a/x"]), "a/? a/x");
        assert!(merge_test_layers(&["a, a/x"]).is_err());
    }

    #[test]
    fn whiteouts_remove_lower_entries_in_any_order() {
        assert_eq!(format_merged_tree(&["a/, a/x, a/y", "a/.wh.x"]), "a/ a/y");
        assert_eq!(format_merged_tree(&["a/, a/x, b", ".wh.a"]), "b");
        for layer in [".wh.a, a/, a/new", "a/, a/new, .wh.a", "a/, .wh.a, a/new"] {
            assert_eq!(format_merged_tree(&["a/, a/x, a/d/, a/d/y", layer]), "a/ a/new", "{layer}");
        }
        for layer in ["a/, a/.wh..wh..opq, a/new", "a/new, a/.wh..wh..opq"] {
            assert_eq!(format_merged_tree(&["a/, a/x, a/d/, a/d/y", layer]), "a/ a/new", "{layer}");
        }
        assert_eq!(format_merged_tree(&["a/, a/x", "a/new, .wh.a"]), "a/? a/new");
        // A file of this layer stays, and so does a link to a lower file.
        assert_eq!(format_merged_tree(&["x, y", "x, .wh.x"]), "x y");
        assert_eq!(format_merged_tree(&["x, y", "x = y, .wh.x"]), "x y");
        // The lowest layer has nothing below it to remove.
        assert_eq!(format_merged_tree(&["x, .wh.x, .wh.y, .wh..wh..opq"]), "x");
        assert_eq!(format_merged_tree(&["x", ".wh..wh..opq"]), "");
        assert_eq!(format_merged_tree(&["x", ".wh..wh.plnk/1.2, .wh..wh.aufs"]), "x");
        for bad in [".wh.", ".wh..", ".wh...", "a/.wh."] {
            assert!(merge_test_layers(&["x", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn hard_links_resolve_across_layers() {
        let merge = merge_test_layers(&["x, d/", "d/y = x", "x"]).unwrap();
        let find = |path: &str| merge.find_node(&split_path(path.as_bytes()).unwrap()).unwrap();
        assert_ne!(find("x"), find("d/y"));
        assert_eq!(merge_test_layers(&["x", "y = x"]).unwrap().tree.len(), 2);
        let outside = merge_test_layers(&["x, d/", "y = d/../nothing", "z = y"]).unwrap();
        assert_eq!(outside.outside.values().collect::<Vec<_>>(), [b"nothing"]);
        assert_eq!(merge_test_layers(&["y = nothing", "y"]).unwrap().tree.len(), 3);
        for bad in ["y = d", "y = ../x", " = x"] {
            assert!(merge_test_layers(&["x, d/", bad]).is_err(), "{bad}");
        }
    }

    #[test]
    fn symlinks_in_paths_stay_inside_tree() {
        assert_eq!(
            format_merged_tree(&["usr/, usr/lib/, lib -> usr/lib", "lib/x"]),
            "lib usr/ usr/lib/ usr/lib/x"
        );
        assert_eq!(format_merged_tree(&["out -> ../../etc", "out/passwd"]), "etc/? etc/passwd out");
        assert_eq!(
            format_merged_tree(&["a/, a/out -> /b/../../c", "a/out/x"]),
            "a/ a/out b/? c/? c/x"
        );
        assert!(merge_test_layers(&["a -> b, b -> a", "a/x"]).is_err());
        assert!(merge_test_layers(&["", "../x"]).is_err());
        // An entry that names the link itself replaces it.
        assert_eq!(format_merged_tree(&["usr/, lib -> usr", "lib/, lib/x"]), "lib/ lib/x usr/");
    }

    #[test]
    fn paths_cannot_leave_tree() {
        assert_eq!(split_path(b"./a//b/").unwrap(), [b"a", b"b"]);
        assert!(split_path(b"./").unwrap().is_empty());
        assert_eq!(split_path(b"a/../b/./c/..").unwrap(), [b"b"]);
        for bad in [&b".."[..], b"a/../../b", b"../a", b"/a/../.."] {
            assert!(split_path(bad).is_err());
        }
    }
}
