//! Which paths are git metadata that a later `git` on the host would execute or trust.
//!
//! A path alone cannot tell whether a repository was there before the command: `git init`, `git worktree add` and the clone of a submodule write
//! the same names that an attacker would. So the question is cut in two. [`candidates`] is pure and says *if* this folder is a git directory, *then* the
//! path is that part of it. A [`RepositoryView`] says whether that git directory predates the command; only then is the part protected.
//!
//! Known limit: a repository that the command itself makes is its own, hooks included.
use crate::denial::Operation;

/// A part of a git directory that executes something or decides what is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GitPart {
    /// The `.git` entry itself, folder or pointer file.
    Entry,
    /// `hooks` and everything below.
    Hooks,
    /// `config`.
    Config,
    /// `config.worktree`.
    WorktreeConfig,
    /// `commondir`: where the rest of a linked git directory is.
    CommonDir,
    /// `info/attributes`: may name filters and diff drivers.
    Attributes,
    /// `gitdir` of a linked worktree.
    Pointer,
    /// A folder that holds such parts (`info`, `modules`, `worktrees` and the git directories below the last two): must not be exchanged whole.
    Container,
}

/// One reading of a path: if `git_dir` is a git directory (or a `.git` entry), the path is this part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate<'a> {
    /// The folder or entry that would have to predate the command.
    pub git_dir: &'a [u8],
    /// What the path would be.
    pub part: GitPart,
    /// The name of `git_dir` already says git directory (`.git`, `x.git`, `.git/worktrees/x`, `.git/modules/x`); otherwise only its content can.
    pub named: bool,
}

/// What the judge knows about repositories; kept by whoever judges, because [`crate::decide`] has no state.
///
/// To be safe against a racing program the implementation has to look at the *object* and not at the name: the caller pins what it is going to act on,
/// passes the pinned object's canonical path, and compares identity (device, inode, birth time) with what it has seen being made. A git directory that
/// was moved by renaming a folder above it keeps its identity, and with it its protection.
pub trait RepositoryView {
    /// Whether the candidate's git directory existed when the command started. When in doubt: yes if `named`, and yes for any folder that looks like a
    /// git directory (`HEAD` with `objects` and `refs`, or `HEAD` with `commondir`).
    fn predates(&self, candidate: &Candidate<'_>) -> bool;
}

/// The view that knows nothing: every folder with a git directory's name is one, and was there before.
#[derive(Clone, Copy, Debug, Default)]
pub struct EveryRepository;

impl RepositoryView for EveryRepository {
    fn predates(&self, candidate: &Candidate<'_>) -> bool {
        candidate.named
    }
}

/// Folders inside a git directory whose content has free names (a branch may be called `config`), so they are no submodule's git directory.
const CONTENT: [&[u8]; 8] = [
    b"refs",
    b"objects",
    b"logs",
    b"hooks",
    b"info",
    b"rebase-merge",
    b"rebase-apply",
    b"lfs",
];

/// What `path` is by its name alone; none for everything that git keeps but does not trust (objects, refs, index, `config.lock`).
#[must_use]
pub fn git_metadata(path: &[u8]) -> Option<GitPart> {
    candidates(path)
        .into_iter()
        .find(|candidate| candidate.named)
        .map(|candidate| candidate.part)
}

/// Every reading of `path`, the ones with the longest git directory last.
#[must_use]
pub fn candidates(path: &[u8]) -> Vec<Candidate<'_>> {
    let mut found = Vec::new();
    let slashes = path
        .iter()
        .enumerate()
        .filter(|(_, byte)| **byte == b'/')
        .map(|(index, _)| index);
    for slash in slashes.filter(|slash| *slash > 0) {
        let git_dir = &path[..slash];
        if let Some(part) = part_of(&path[slash + 1..]) {
            found.push(Candidate {
                git_dir,
                part,
                named: is_named(git_dir),
            });
        }
    }
    if last(path) == b".git" {
        found.push(Candidate {
            git_dir: path,
            part: GitPart::Entry,
            named: true,
        });
    } else if is_linked(path) {
        found.push(Candidate {
            git_dir: path,
            part: GitPart::Container,
            named: is_directly_linked(path),
        });
    }
    found
}

/// Whether a predating `part` stays as it is under this operation.
#[must_use]
pub fn is_protected_from(part: GitPart, operation: Operation) -> bool {
    match part {
        // `mkdir` never replaces anything, and new files below `.git` are what every commit makes.
        GitPart::Entry => !matches!(operation, Operation::MakeDir | Operation::CheckAccess),
        GitPart::Container => {
            matches!(
                operation,
                Operation::Rename | Operation::Symlink | Operation::Link | Operation::MakeNode
            )
        }
        _ => true,
    }
}

/// What `rest`, a path relative to a git directory, is.
fn part_of(rest: &[u8]) -> Option<GitPart> {
    Some(match rest {
        b"config" => GitPart::Config,
        b"config.worktree" => GitPart::WorktreeConfig,
        b"commondir" => GitPart::CommonDir,
        b"gitdir" => GitPart::Pointer,
        b"info/attributes" => GitPart::Attributes,
        b"info" | b"modules" | b"worktrees" => GitPart::Container,
        b"hooks" => GitPart::Hooks,
        _ if rest.starts_with(b"hooks/") => GitPart::Hooks,
        _ => return None,
    })
}

fn last(path: &[u8]) -> &[u8] {
    path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
}

/// The components after each folder whose own name says git directory.
fn below_git_dirs(path: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    let components: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
    let ends: Vec<usize> = components
        .iter()
        .enumerate()
        .filter(|(_, name)| name.ends_with(b".git"))
        .map(|(index, _)| index + 1)
        .collect();
    ends.into_iter().map(move |end| components[end..].to_vec())
}

/// `.git`, `x.git`, or a linked git directory below one.
fn is_named(git_dir: &[u8]) -> bool {
    last(git_dir).ends_with(b".git") || is_linked(git_dir)
}

/// `<git directory>/worktrees/<id>`, or below `<git directory>/modules` (the name of a submodule may have slashes) outside of [`CONTENT`].
fn is_linked(path: &[u8]) -> bool {
    below_git_dirs(path).any(|below| match below.as_slice() {
        [b"worktrees", _] => true,
        [b"modules", name @ ..] => !name.is_empty() && !name.iter().skip(1).any(|part| CONTENT.contains(part)),
        _ => false,
    })
}

/// The unmistakable ones: `modules/a/index` may be the index of `a` or a submodule called `a/index`, and only its content tells which.
fn is_directly_linked(path: &[u8]) -> bool {
    below_git_dirs(path).any(|below| matches!(below.as_slice(), [b"worktrees" | b"modules", _]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(path: &str) -> Option<GitPart> {
        git_metadata(path.as_bytes())
    }

    #[test]
    fn what_git_executes_or_trusts_is_recognised_in_every_kind_of_git_directory() {
        for dir in [
            "/w/.git",
            "/w/a/b/.git",
            "/w/bare.git",
            "/w/.git/modules/lib",
            "/w/.git/modules/libs/one",
        ] {
            for (name, expected) in [
                ("hooks", GitPart::Hooks),
                ("hooks/pre-commit", GitPart::Hooks),
                ("hooks/d/x", GitPart::Hooks),
                ("config", GitPart::Config),
                ("config.worktree", GitPart::WorktreeConfig),
                ("commondir", GitPart::CommonDir),
                ("info/attributes", GitPart::Attributes),
                ("info", GitPart::Container),
            ] {
                assert_eq!(part(&format!("{dir}/{name}")), Some(expected), "{dir}/{name}");
            }
        }
        assert_eq!(part("/w/.git"), Some(GitPart::Entry));
        assert_eq!(part("/w/.git/worktrees/w2/gitdir"), Some(GitPart::Pointer));
        assert_eq!(part("/w/.git/worktrees/w2"), Some(GitPart::Container));
        assert_eq!(part("/w/.git/modules/lib"), Some(GitPart::Container));
        assert_eq!(part("/w/.git/modules/a/modules/b/hooks/x"), Some(GitPart::Hooks));
    }

    #[test]
    fn what_an_ordinary_commit_or_checkout_writes_is_not() {
        for path in [
            "/w/.git/config.lock",
            "/w/.git/index",
            "/w/.git/HEAD",
            "/w/.git/refs/heads/config",
            "/w/.git/refs/heads/hooks/x",
            "/w/.git/logs/refs/heads/config",
            "/w/.git/modules/a/refs/heads/config",
            "/w/.git/modules/a/index",
            "/w/.git/info/exclude",
            "/w/.git/objects/ab/cd",
            "/w/.git/worktrees/w2/HEAD",
            "/w/.gitignore",
            "/w/.github/hooks/x",
            "/w/hooks/pre-commit",
            "/w/config",
        ] {
            assert_eq!(part(path), None, "{path}");
        }
    }

    #[test]
    fn a_folder_without_a_telling_name_is_still_a_candidate_for_a_view_that_can_look() {
        let found = candidates(b"/w/bare/hooks/x");
        assert_eq!(
            found,
            [Candidate {
                git_dir: b"/w/bare",
                part: GitPart::Hooks,
                named: false
            }],
            "the view decides by the content of /w/bare"
        );
    }
}
