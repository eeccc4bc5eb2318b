use super::*;
use crate::io::{Array, write, write_all};

/// A folder that is removed at the end.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn array(value: i32) -> Array {
    Array::from(vec![value])
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

fn started(path: &Path, text: &str) -> Replacement {
    let mut file = Replacement::begin(path).unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

#[test]
fn a_file_appears_when_it_is_complete() {
    let folder = folder();
    let path = folder.path().join("x.txt");
    let file = started(&path, "new");
    assert!(!path.exists());
    Replacement::commit(vec![file]).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), "new");
    drop(started(&path, "dropped"));
    assert_eq!(
        (fs::read_to_string(&path).unwrap().as_str(), names(folder.path())),
        ("new", vec!["x.txt".into()])
    );
}

#[test]
fn all_files_or_none() {
    let folder = folder();
    let [old, new, last] = ["old", "new", "last"].map(|name| folder.path().join(name));
    fs::write(&old, "before").unwrap();
    let files = [&old, &new, &last].map(|path| started(path, "after"));
    // What nobody could foresee when the files were started.
    fs::create_dir(&last).unwrap();
    let error = Replacement::commit(files.into()).unwrap_err();
    assert_eq!(error.path, last);
    assert_eq!(fs::read_to_string(&old).unwrap(), "before");
    assert_eq!(names(folder.path()), ["last", "old"]);

    fs::remove_dir(&last).unwrap();
    Replacement::commit([&old, &new, &last].map(|path| started(path, "after")).into()).unwrap();
    assert_eq!(
        (fs::read_to_string(&old).unwrap().as_str(), names(folder.path()).len()),
        ("after", 3)
    );
}

#[test]
fn one_that_cannot_be_written_keeps_all_from_changing() {
    let folder = folder();
    let [good, bad] = ["good.npy", "bad.npy"].map(|name| folder.path().join(name));
    write(&good, &[("", &array(1))]).unwrap();
    let before = fs::read(&good).unwrap();
    let two = [("a", &array(2)), ("b", &array(3))];
    // Two arrays do not fit into one .npy file.
    assert!(write_all(&[(&good, &two[..1]), (&bad, &two)]).is_err());
    assert_eq!(
        (fs::read(&good).unwrap(), names(folder.path())),
        (before, vec!["good.npy".to_owned()])
    );
}

#[test]
fn what_cannot_be_written_is_known_before() {
    let folder = folder();
    let problem = |path: &Path| Replacement::begin(path).unwrap_err().problem;
    assert!(matches!(problem(folder.path()), Problem::NotAFile));
    let nowhere = folder.path().join("no/such/x.npy");
    assert!(matches!(problem(&nowhere), Problem::NoFolder(_)));
    fs::write(folder.path().join("file"), "").unwrap();
    assert!(matches!(problem(&folder.path().join("file/x.npy")), Problem::Io(_)));
    #[cfg(unix)]
    {
        use std::os::unix::fs::symlink;
        for (name, target) in [("null.npy", "/dev/full"), ("nothing.npy", "no/such/file")] {
            symlink(target, folder.path().join(name)).unwrap();
        }
        assert!(matches!(problem(&folder.path().join("null.npy")), Problem::NotAFile));
        assert!(matches!(problem(&folder.path().join("nothing.npy")), Problem::Io(_)));
    }
}

#[cfg(unix)]
#[test]
fn links_and_permissions_stay() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = folder();
    let (file, link) = (folder.path().join("file"), folder.path().join("link"));
    fs::write(&file, "old").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let usual = mode(&file);
    fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
    symlink("file", &link).unwrap();
    assert_eq!(destination(&link).unwrap(), destination(&file).unwrap());
    Replacement::commit(vec![started(&link, "new")]).unwrap();
    assert!(link.is_symlink());
    assert_eq!((fs::read_to_string(&file).unwrap().as_str(), mode(&file)), ("new", 0o640));

    let fresh = folder.path().join("fresh");
    Replacement::commit(vec![started(&fresh, "")]).unwrap();
    assert_eq!(mode(&fresh), usual);
}
