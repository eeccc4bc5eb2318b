use std::{collections::BTreeMap, ops::Range};

/// The images of one kernel source for one target, or for two whose machine code is nearly equal: a
/// zstd file whose frames hold several images each, with an index in front of them.
///
/// Images of equal tiles are nearly equal, so they compress best side by side in one frame. Frames
/// are bounded, because using one image means unpacking its whole frame.
///
/// The index is a skippable frame (RFC 8878, section 3.1.2), so every zstd tool reads such a file:
/// [`INDEX_MAGIC`](Self::INDEX_MAGIC), the length of the text as a little-endian u32, and one line
/// for each image: `name frame-start frame-length offset length`. The start of a frame counts from
/// the end of the index, the offset of an image from the start of the unpacked frame.
#[derive(Clone, Debug)]
pub struct Archive<'a> {
    entries: BTreeMap<&'a str, Entry>,
    frames: &'a [u8],
}

/// Where an image is in an [`Archive`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Range of its frame, in bytes from the end of the index.
    pub frame: Range<usize>,
    /// Range of its bytes in the unpacked frame.
    pub image: Range<usize>,
}

impl<'a> Archive<'a> {
    /// The first four bytes, little-endian.
    pub const INDEX_MAGIC: u32 = 0x184D_2A50;

    /// Reads the index. An error describes the damage.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, String> {
        let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        if word(0) != Some(Self::INDEX_MAGIC) {
            return Err("it does not begin with an index".to_owned());
        }
        let index = word(4).and_then(|length| bytes.get(8..)?.split_at_checked(length as usize));
        let (index, frames) = index.ok_or("its index is cut off")?;
        let index = std::str::from_utf8(index).map_err(|error| error.to_string())?;
        let parse = |line: &'a str| {
            let (name, numbers) = line.split_once(' ')?;
            let numbers: Vec<usize> = numbers.split(' ').map_while(|n| n.parse().ok()).collect();
            let [frame, frame_length, image, length] = numbers[..] else { return None };
            let frame = frame..frame.checked_add(frame_length)?;
            frames.get(frame.clone())?;
            Some((name, Entry { frame, image: image..image.checked_add(length)? }))
        };
        let entry = |line| parse(line).ok_or_else(|| format!("its index has the line {line:?}"));
        Ok(Self { entries: index.lines().map(entry).collect::<Result<_, _>>()?, frames })
    }

    /// Every image by its name.
    pub fn entries(&self) -> &BTreeMap<&'a str, Entry> {
        &self.entries
    }

    /// Unpacks a frame. [`Entry::image`] is the range of an image in it.
    pub fn unpack(&self, frame: &Range<usize>) -> Result<Vec<u8>, String> {
        let of_frame = self.entries.values().filter(|entry| entry.frame == *frame);
        let size = of_frame.map(|entry| entry.image.end).max().unwrap_or(0);
        let compressed = self.frames.get(frame.clone()).ok_or("it has no such frame")?;
        let mut raw = Vec::with_capacity(size);
        ruzstd::decoding::FrameDecoder::new()
            .decode_all_to_vec(compressed, &mut raw)
            .map_err(|error| error.to_string())?;
        if raw.len() == size { Ok(raw) } else { Err("a frame has another size".to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(index: &str, frames: &[u8]) -> Vec<u8> {
        let length = (index.len() as u32).to_le_bytes();
        [&Archive::INDEX_MAGIC.to_le_bytes(), &length, index.as_bytes(), frames].concat()
    }

    #[test]
    fn what_is_damaged_is_named() {
        let error = |bytes: &[u8]| Archive::parse(bytes).unwrap_err();
        assert_eq!(error(b"\x28\xb5\x2f\xfd"), "it does not begin with an index");
        assert_eq!(error(&archive("a 0 0 0 0\n", b"")[..12]), "its index is cut off");
        let max = usize::MAX;
        for line in
            ["a", "a 0 0 0", "a 0 5 0 1", "a 0 4 0 x", &format!("a {max} 1 0 1"), "a -1 0 0"]
        {
            assert_eq!(error(&archive(line, b"1234")), format!("its index has the line {line:?}"));
        }
        let bytes = archive("a 0 4 0 1\nb 0 4 1 9\n", b"1234");
        let archive = Archive::parse(&bytes).unwrap();
        assert_eq!(archive.entries()["b"], Entry { frame: 0..4, image: 1..10 });
        assert!(archive.unpack(&(0..4)).is_err() && archive.unpack(&(2..9)).is_err());
    }
}
