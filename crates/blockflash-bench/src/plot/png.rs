//! PNG files: 8-bit RGB, no colour profile (<https://www.w3.org/TR/png-3/>).

use miniz_oxide::deflate::compress_to_vec_zlib;

const SIGNATURE: &[u8] = b"\x89PNG\r\n\x1a\n";
/// Beyond this files hardly become smaller.
const EFFORT: u8 = 8;

/// Rows of `width` pixels, top row first.
pub(super) fn encode(width: u32, pixels: &[[u8; 3]]) -> Vec<u8> {
    let height = pixels.len() as u32 / width.max(1);
    let mut header = Vec::new();
    header.extend(width.to_be_bytes());
    header.extend(height.to_be_bytes());
    // 8 bits, RGB, and the only compression, filter method and order there is.
    header.extend([8, 2, 0, 0, 0]);
    let mut rows = Vec::with_capacity(pixels.len() * 3 + height as usize);
    for row in pixels.chunks_exact(width.max(1) as usize) {
        // Areas of one colour compress best as they are.
        rows.push(0);
        rows.extend(row.as_flattened());
    }
    let mut png = SIGNATURE.to_vec();
    chunk(&mut png, b"IHDR", &header);
    chunk(&mut png, b"IDAT", &compress_to_vec_zlib(&rows, EFFORT));
    chunk(&mut png, b"IEND", &[]);
    png
}

fn chunk(png: &mut Vec<u8>, name: &[u8; 4], data: &[u8]) {
    png.extend((data.len() as u32).to_be_bytes());
    let start = png.len();
    png.extend(name);
    png.extend(data);
    png.extend(crc32(&png[start..]).to_be_bytes());
}

fn crc32(bytes: &[u8]) -> u32 {
    let shifted = |crc: u32| if crc & 1 == 0 { crc >> 1 } else { crc >> 1 ^ 0xEDB8_8320 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), |crc, _| shifted(crc)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use miniz_oxide::inflate::decompress_to_vec_zlib;

    #[test]
    fn a_file_holds_its_pixels() {
        let pixels = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [250, 251, 252]];
        let png = encode(2, &pixels);
        assert!(png.starts_with(SIGNATURE));
        let mut rest = &png[SIGNATURE.len()..];
        let mut chunks = Vec::new();
        while let [a, b, c, d, name_data_crc @ ..] = rest {
            let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
            let (body, tail) = name_data_crc.split_at(4 + length);
            assert_eq!(crc32(body).to_be_bytes(), tail[..4]);
            chunks.push((&body[..4], &body[4..]));
            rest = &tail[4..];
        }
        let names: Vec<_> = chunks.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, [b"IHDR", b"IDAT", b"IEND"]);
        assert_eq!(chunks[0].1, [0, 0, 0, 2, 0, 0, 0, 2, 8, 2, 0, 0, 0]);
        let rows = decompress_to_vec_zlib(chunks[1].1).unwrap();
        assert_eq!(rows, [0, 1, 2, 3, 4, 5, 6, 0, 7, 8, 9, 250, 251, 252]);
    }

    #[test]
    fn the_checksum_is_that_of_the_standard() {
        assert_eq!(crc32(b"123456789"), 0xCBF4_3926);
        assert_eq!(crc32(b"IEND"), 0xAE42_6082);
    }
}
