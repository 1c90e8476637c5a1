"""`python -m references.masks` prints the gallery."""

from references.masks.pictures import main

if __name__ == "__main__":
    main()
