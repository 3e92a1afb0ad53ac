//! What the README says of security, as far as it is not tested where it is done: the program with
//! another user's environment, files that are written, files that are read.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use crate::program::{copied, model, output, text, vbar, written_model};

/// Nobody in particular.
const ANOTHER_USER: u32 = 65_534;
/// A device that there is not, so that whoever heeds it fails.
const WRONG: &str = "neither-cuda-nor-sim";

/// Runs a copy of the program as another user, with the mode that is given to it and an environment
/// that says what it must not heed.
fn run_as_another(mode: u32, folder: &Path, model: &Path) -> Output {
    let program = copied(folder);
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(mode)).unwrap();
    let mut command = Command::new(program);
    command.args(["run", text(model), "--device", "auto", "--budget", "100%", "--passes", "1"]);
    command.env("VBAR_DRIVER", WRONG).env("VBAR_TRACE", folder.join("trace.json"));
    command.uid(ANOTHER_USER).gid(ANOTHER_USER).output().unwrap()
}

/// With rights that its user has not, the program takes neither a driver nor the name of a file to
/// write from the environment, which is that user's.
#[test]
fn a_setuid_program_heeds_no_variable() {
    if !rustix::process::geteuid().is_root() {
        println!("only root can make a program that others run with its rights");
        return;
    }
    let (models, path) = model("4M");
    let folder = tempfile::tempdir().unwrap();
    for open in [models.path(), folder.path()] {
        std::fs::set_permissions(open, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    // What the test stands on: without such rights the variable counts.
    let said = run_as_another(0o755, folder.path(), &path);
    let errors = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(2), "{errors}");
    assert!(errors.contains("VBAR_DRIVER") && errors.contains(WRONG), "{errors}");
    let said = run_as_another(0o4755, folder.path(), &path);
    let errors = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(0), "a mount without setuid? {errors}");
    assert!(!folder.path().join("trace.json").exists(), "a trace was written");
}

/// A library in the folder where a program is started is not the driver's.
#[test]
fn no_library_comes_from_the_current_folder() {
    let folder = tempfile::tempdir().unwrap();
    // Were it opened, this text would be the error.
    std::fs::write(folder.path().join("libcuda.so.1"), "no library at all").unwrap();
    let mut command = vbar(&["doctor", "--device", "cuda", "--json"]);
    let said = command.current_dir(folder.path()).output().unwrap();
    let all = [said.stdout, said.stderr].concat();
    let all = String::from_utf8_lossy(&all);
    assert!(!all.contains("invalid ELF") && !all.contains("file too short"), "{all}");
}

/// What is written by name replaces no file that a link leads to.
#[test]
fn links_are_not_written_through() {
    let (folder, path) = model("4M");
    let kept = folder.path().join("kept");
    let link = folder.path().join("link.json");
    std::fs::write(&kept, "").unwrap();
    symlink(&kept, &link).unwrap();
    let arguments =
        ["trace", text(&path), "--output", text(&link), "--device", crate::program::SIM];
    let said = output(&arguments);
    let errors = String::from_utf8_lossy(&said.stderr);
    assert_eq!(said.status.code(), Some(3), "{errors}");
    assert!(errors.contains("symbolic link"), "{errors}");
    assert!(std::fs::read(&kept).unwrap().is_empty());
    // The model that `synth` writes has a name of its own until it is whole.
    let partial = folder.path().join(".new.safetensors.partial");
    symlink(&kept, &partial).unwrap();
    let new = folder.path().join("new.safetensors");
    let said = output(&["synth", text(&new), "--bytes", "1M"]);
    assert!(!said.status.success());
    assert!(std::fs::read(&kept).unwrap().is_empty() && !new.exists());
}

/// An index of shards names files of its own folder. What these are is for whoever writes to that
/// folder: a link there is followed, as the caches of models are made of links.
#[test]
fn an_index_does_not_lead_out_of_its_folder_by_names() {
    let (folder, path) = written_model(&[("w", 64)]);
    let index = folder.path().join("model.safetensors.index.json");
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret.safetensors");
    std::fs::copy(&path, &secret).unwrap();
    let names = [text(&secret).to_owned(), format!("../{}", text(&secret)), "./../x".to_owned()];
    for name in names {
        std::fs::write(&index, format!(r#"{{"weight_map":{{"w":"{name}"}}}}"#)).unwrap();
        let said = output(&["inspect", text(&index)]);
        let errors = String::from_utf8_lossy(&said.stderr);
        assert_eq!(said.status.code(), Some(3), "{name}: {errors}");
        assert!(errors.contains("not a path inside the index's folder"), "{errors}");
    }
    symlink(&secret, folder.path().join("link.safetensors")).unwrap();
    std::fs::write(&index, r#"{"weight_map":{"w":"link.safetensors"}}"#).unwrap();
    assert!(output(&["inspect", text(&index)]).status.success());
}

/// A file with another program's instructions is data: what a header says is compared with the
/// file, and names are shown without what a terminal obeys.
#[test]
fn a_name_in_a_file_is_no_command_to_the_terminal() {
    let (_folder, path) = written_model(&[("\u{1b}]0;owned\u{7}\u{1b}[2J", 64)]);
    let said = output(&["inspect", text(&path)]);
    assert!(said.status.success());
    let shown = String::from_utf8_lossy(&said.stdout);
    assert!(shown.contains("owned") && !shown.contains('\u{1b}'), "{shown:?}");
}
