//! A picture of a folder: every name with type, mode, owner, times, attributes and content, to be equal before and after.
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What one name is. Access times are left out: reading is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    kind: &'static str,
    inode: u64,
    links: u64,
    mode: u32,
    owner: (u32, u32),
    modified: (i64, i64),
    changed: (i64, i64),
    attributes: Vec<u8>,
    content: Vec<u8>,
}

/// Every name below a folder, and the folder itself.
pub type Picture = BTreeMap<PathBuf, Entry>;

/// Takes the picture of `root`. Never follows a link.
#[must_use]
pub fn picture(root: &Path) -> Picture {
    let mut picture = Picture::new();
    visit(root, &mut picture);
    picture
}

fn visit(path: &Path, picture: &mut Picture) {
    let meta = fs::symlink_metadata(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let kind = meta.file_type();
    let (kind, content) = match kind {
        _ if kind.is_dir() => ("folder", Vec::new()),
        _ if kind.is_symlink() => (
            "link",
            fs::read_link(path).unwrap().into_os_string().into_encoded_bytes(),
        ),
        _ if kind.is_file() => ("file", content_of(path)),
        _ if kind.is_fifo() => ("fifo", Vec::new()),
        _ if kind.is_socket() => ("socket", Vec::new()),
        _ => ("device", Vec::new()),
    };
    let mut attributes = [0; 4096];
    let length = rustix::fs::llistxattr(path, &mut attributes[..]).unwrap_or(0);
    picture.insert(
        path.to_owned(),
        Entry {
            kind,
            inode: meta.ino(),
            links: meta.nlink(),
            mode: meta.mode(),
            owner: (meta.uid(), meta.gid()),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
            attributes: attributes[..length].to_vec(),
            content,
        },
    );
    if kind == "folder" {
        for entry in fs::read_dir(path).unwrap() {
            visit(&entry.unwrap().path(), picture);
        }
    }
}

/// What is in a file; a file that its owner may not read has its size, times and mode to go by.
fn content_of(path: &Path) -> Vec<u8> {
    match fs::read(path) {
        Ok(content) => content,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Vec::new(),
        Err(error) => panic!("{}: {error}", path.display()),
    }
}

/// Fails with the differing names when the two pictures differ.
#[track_caller]
pub fn assert_same(before: &Picture, after: &Picture, what: &str) {
    let differing: Vec<_> = before
        .keys()
        .chain(after.keys())
        .filter(|name| before.get(*name) != after.get(*name))
        .collect();
    if let Some(first) = differing.first() {
        panic!(
            "{what}: {differing:?} changed: {:?} -> {:?}",
            before.get(*first),
            after.get(*first)
        );
    }
}
